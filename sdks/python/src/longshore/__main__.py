"""`python -m longshore app:ls` is `longshore-worker app:ls`."""

from ._cli import main

if __name__ == "__main__":
    main()
