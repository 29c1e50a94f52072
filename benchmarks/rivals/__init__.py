"""What a sparse product is compared with, one module each in one shape."""
