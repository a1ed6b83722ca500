"""What tests/fuzz.py draws: valid calls and malformed ones, each from its seed."""
