"""The program that `hopsparse profile` runs under ncu: each subject once, between two marks.

python -m hopsparse.cli.profile_worker '[{"op": "dense", "out": 64, "k": 64, "tokens": 8}]'
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from ..measure.profile.phases import marked
from .profile_subjects import Setting, build

_WARM_CALLS = 2


def main(words: list[str]) -> None:
    """Run the settings that the first word lists as JSON."""
    settings = [Setting(**each) for each in json.loads(words[0])]
    device = torch.device("cuda", torch.cuda.current_device())
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for setting in settings:
            call = build(setting, device).calls[0]
            # What it compiles, tunes or looks up is not part of it.
            for _ in range(_WARM_CALLS):
                call()
            torch.cuda.synchronize()
            runtime.cudaProfilerStart()
            with marked(setting.name):
                call()
            torch.cuda.synchronize()
            runtime.cudaProfilerStop()


if __name__ == "__main__":
    main(sys.argv[1:])
