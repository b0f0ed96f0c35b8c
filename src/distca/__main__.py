"""``python -m distca`` is the command ``distca``."""

from distca.cli import main

if __name__ == "__main__":
    main()
