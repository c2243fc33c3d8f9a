"""The command line: the only place that reads the process's arguments and environment.

A command is a module in `fmengine.commands` with `add_arguments(parser)` and `run(args, environ)`; only
the module of the command that is called gets imported, so that `fmengine --help` costs nothing.
"""

import argparse
import errno
import importlib
import os
import select
import sys
from collections.abc import Sequence

from fmengine import __version__
from fmengine.errors import PeerLostError, UserError
from fmengine.start.variants import IMAGE

COMMANDS = {
    "train": "train a model; in a run folder, go on from its newest whole checkpoint",
    "prepare": "turn text into tokens: .jsonl, .txt to Megatron's .bin/.idx",
    "validate": "check a config without a GPU, before a job is queued",
    "export": "write a checkpoint as a folder that Hugging Face Transformers loads, and verify it",
    "generate": "print a sample from a checkpoint",
    "doctor": "say whether every component is here, imports and runs",
    "env": "say which rank of how many this process is, and why",
    "schema": "print the JSON Schema of a config file, for editors",
}
"""Name of a command, and of its module, to the line that `--help` shows."""

DESCRIPTION = "Train LLaMA and GPT-NeoX models with DeepSpeed, from text to a model that Hugging Face loads."

EPILOG = """\
examples:
  fmengine train                                    the default model on text that is already here, some minutes
  fmengine train --set model.family=neox            the same as a GPT-NeoX
  fmengine prepare books.jsonl.zst --tokenizer tokenizer.json --out data/books
  fmengine validate config.yaml --world-size 32     exit code 0, or 2 and every mistake by file:line
  fmengine train config.yaml                        again: goes on where it stopped
  fmengine export runs/default --out model          then: AutoModelForCausalLM.from_pretrained("model")

what is written where:
  RUN is run.dir of the config, runs/default by default. Nothing else is written but caches.
  RUN/config.yaml                    the config with every default filled in
  RUN/checkpoints/step-00000100/     a checkpoint; whole when it has the file COMPLETE
  RUN/logs/rank-0000.log             what each rank says
  RUN/metrics.jsonl                  a line for each step

exit codes: 0 done, 2 a mistake in the input (a line each on stderr), 130 stopped by Ctrl-C, 1 anything else
`fmengine COMMAND --help` says more about a command.
"""

INTERRUPTED = 128 + 2
"""Exit code after Ctrl-C: 128 + SIGINT, as shells have it."""

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Of an error that names no file, those that standard output gives; what writes files itself names them."""

BROKEN_PIPE = 128 + 13
"""Exit code where nobody reads our output any more: 128 + SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; by default this process's.

    Returns:
        The exit code.

    Raises:
        SystemExit: `--help`, `--version`, or arguments that argparse refuses (code 2).
    """
    _open_closed_streams()
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = next((word for word in arguments if not word.startswith("-")), None)
    parser = build_parser(name)
    try:
        if IMAGE in os.environ and name is not None and name == arguments[0] and name in COMMANDS:
            from fmengine.start.begin import begin

            begin(arguments, os.environ)
        if name is not None and name not in COMMANDS:
            parser.print_help(sys.stderr)
        args = parser.parse_args(arguments)
        if args.command is None:
            parser.print_help()
            return 2
        command = importlib.import_module(f"fmengine.commands.{args.command}")
        code: int = command.run(args, dict(os.environ))
        print(end="", flush=True)  # a broken pipe shows here and not at exit; stdout may be None
    except UserError as error:
        for problem in error.problems:
            print(f"fmengine: error: {problem}", file=sys.stderr)
        return 2
    except PeerLostError as error:
        print(f"fmengine: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fmengine: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _stdout_is_broken():  # some other pipe or socket: an error like any other
            raise
        return BROKEN_PIPE
    except OSError as error:
        if error.filename is None and error.errno not in FULL:  # nothing a user could look at
            raise
        _drop_what_stdout_refuses()
        print(f"fmengine: error: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        return 2
    return code


def _open_closed_streams() -> None:
    """Send a standard stream that was closed (`>&-`) nowhere, or the next file would be opened in its place."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _stdout_is_broken() -> bool:
    """Whether nobody reads our output any more; it then goes nowhere, so that the flush at exit does not fail too."""
    try:
        output = sys.stdout.fileno()
    except (AttributeError, OSError):  # closed, or no file
        return False
    poll = select.poll()
    poll.register(output, 0)
    broken = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if broken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return broken


def _drop_what_stdout_refuses() -> None:
    """On a full disk the flush at exit would fail too."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser(name: str | None) -> argparse.ArgumentParser:
    """The parser, with the arguments of the command `name` alone filled in."""
    parser = argparse.ArgumentParser(
        prog="fmengine",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fmengine {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command, line in COMMANDS.items():
        sub = commands.add_parser(
            command,
            help=line,
            description=f"{line[0].upper()}{line[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if command == name:
            importlib.import_module(f"fmengine.commands.{command}").add_arguments(sub)
    return parser
