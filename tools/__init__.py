"""Commands: prepare a corpus, pre-train, plot, benchmark. They run from a checkout, as `python -m tools.NAME`."""

import sys

from tools.common.early_end import end_quietly_on_ctrl_c
from tools.common.garbage import collect_seldom
from tools.common.quick_help import asks_for_help, import_stand_ins

# Python names a program "-m" for as long as it looks for the module to run: this process is a command's alone.
if sys.argv[0] == "-m":
    end_quietly_on_ctrl_c()
    collect_seldom()  # `run_main` ends it
    if asks_for_help(sys.argv[1:]):
        import_stand_ins()
