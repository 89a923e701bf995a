"""How a command ends: an exit status, and one message where something went wrong."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import torch.distributed as dist

from tensor3d.agree import in_words
from tensor3d.peers import PeerError


def guarded(name: str, action: Callable[[], int]) -> int:
    """The exit status of `action`; 2 for bad input or a file that cannot be read or written, 1 where another rank died
    (one message on standard error each), 130 after Ctrl-C.

    Args:
        name: of the command, such as "tools.gpt".
    """
    try:
        return action()
    except (ValueError, FloatingPointError, OSError) as problem:
        print(f"{name}: {in_words(problem)}", file=sys.stderr, flush=True)
        return 2
    except PeerError as problem:
        print(f"{name}: {problem}", file=sys.stderr, flush=True)
        return 1
    except dist.DistError as problem:
        print(f"{name}: {str(problem).splitlines()[0]}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        # torchrun passes on the Ctrl-C that has reached this process already.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return 130
