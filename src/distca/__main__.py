"""``python -m distca`` and the script ``distca``: the command line, with Ctrl-C from the start."""

from distca.runtime.interrupts import end_on_ctrl_c


def main() -> None:
    end_on_ctrl_c()
    from distca.cli import main as run  # takes a moment

    run()


if __name__ == "__main__":
    main()
