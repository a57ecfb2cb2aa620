"""``python -m tightrope`` is the ``tightrope`` command."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
