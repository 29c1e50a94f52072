"""Photographs that packages carry, split by image, as crops for a network of 224 x 224 pixels.

scikit-image and scikit-learn carry some in their wheels; the Debian packages mate-backgrounds,
lomiri-wallpapers-16.04 and lomiri-wallpapers-20.04 put others into /usr/share/backgrounds. They
have no ImageNet labels; `LABELS` are those that a person gives without hesitation.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

SIDE = 224
#: Every source and kind of subject is on both sides; no image is.
CALIBRATION = (
    "brick.png",
    "camera.png",
    "coins.png",
    "grass.png",
    "ihc.png",
    "motorcycle_left.png",
    "retina.jpg",
    "china.jpg",
    "Aqua.jpg",
    "Blinds.jpg",
    "FreshFlower.jpg",
    "GreenMeadow.jpg",
    "RainDrops.jpg",
    "Storm.jpg",
    "Wood.jpg",
    "YellowFlower.jpg",
    "Bridge_by_Sander_Klootwijk.jpg",
    "Kleiber_by_Lukas_Baubkus.jpg",
    "Picture_1A_by_freespace.jpg",
    "Wine_by_Jakkub_Mede.jpg",
    "aitzgorri_by_Aitzol_Berasategi.jpg",
    "greentock_by_Peter_Nerlich.jpg",
    "life_by_Aitzol_Berasategi.jpg",
    "seeding_by_Clements_Engelhardt.jpg",
)
EVALUATION = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "moon.png",
    "rocket.jpg",
    "flower.jpg",
    "Dune.jpg",
    "Garden.jpg",
    "LadyBird.jpg",
    "TwoWings.jpg",
    "Dragonfly_by_Bolly.jpg",
    "Infinite-Sea_by_Aury88.jpg",
    "Picture_0B_by_freespace.jpg",
    "free_by_Peter_Nerlich.jpg",
    "friends_by_Aitzol_Berasategi.jpg",
    "picosdeeuropa_by_Aitzol_Berasategi.jpg",
    "sunset_by_Aitzol_Berasategi.jpg",
)
#: ImageNet classes that are right for an image of `EVALUATION`.
LABELS: dict[str, set[int]] = {
    "chelsea.png": {281, 282, 283, 284, 285},  # cats
    "coffee.png": {504, 967, 968},  # coffee mug, espresso, cup
    "rocket.jpg": {657, 744},  # missile, projectile
    "LadyBird.jpg": {301},  # ladybug
    "friends_by_Aitzol_Berasategi.jpg": set(range(151, 269)),  # dogs
    "picosdeeuropa_by_Aitzol_Berasategi.jpg": {970},  # alp
}


def crops(names: tuple[str, ...], count: int, backgrounds: Path) -> list[Tensor]:
    """For each image `count` crops [count, 3, 224, 224]: the centre, then random resized ones.

    Args:
        names: Of images; the crops of an image depend on its name and nothing else.
        count: Crops of each.
        backgrounds: Folder in which those of the Debian packages lie.
    """
    folders = [*_package_folders(), *[p for p in backgrounds.rglob("*") if p.is_dir()], backgrounds]
    found = []
    for name in names:
        path = next((f / name for f in folders if (f / name).is_file()), None)
        if path is None:
            raise SystemExit(f"{name} is missing: install the packages that {__file__} names")
        found.append(_crops(path, count))
    return found


def _crops(path: Path, count: int) -> Tensor:
    draw = random.Random(path.name)
    with Image.open(path) as opened:
        opened.draft("RGB", (1024, 1024))
        image = opened.convert("RGB")
    if min(image.size) > 1024:
        image.thumbnail((1536, 1536), Image.Resampling.LANCZOS)
    boxes = [_centre(image.size)] + [_box(image.size, draw) for _ in range(count - 1)]
    pixels = []
    for index, box in enumerate(boxes):
        crop = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box)
        if index and draw.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels.append(np.asarray(crop))
    stacked = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
    # As the EfficientNet-Lite checkpoints were trained: (pixel - 127) / 128.
    return ((stacked.float() - 127.0) / 128.0).contiguous(memory_format=torch.channels_last)


def _centre(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The middle square, 7/8 of the shorter side."""
    side = 0.875 * min(size)
    left, top = (size[0] - side) / 2, (size[1] - side) / 2
    return left, top, left + side, top + side


def _box(size: tuple[int, int], draw: random.Random) -> tuple[float, float, float, float]:
    """30 to 100 % of the area, sides between 3:4 and 4:3."""
    while True:
        area = size[0] * size[1] * draw.uniform(0.3, 1.0)
        ratio = draw.uniform(0.75, 4 / 3)
        width, height = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if width <= size[0] and height <= size[1]:
            left, top = draw.uniform(0, size[0] - width), draw.uniform(0, size[1] - height)
            return left, top, left + width, top + height


def _package_folders() -> list[Path]:
    folders = []
    for package, inside in (("skimage", "data"), ("sklearn", "datasets/images")):
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("pip install --no-deps scikit-image scikit-learn")
        folders.append(Path(next(iter(spec.submodule_search_locations))) / inside)
    return folders
