"""Run other programs, such as git and uv, with their messages in errors."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class CommandError(RuntimeError):
    """A program failed; the message contains its output."""


def run(
    command: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None, text: str | None = None
) -> str:
    """Run ``command`` in ``folder`` and return what it wrote to stdout.

    Args:
        command: The program and its arguments.
        folder: Where to run it.
        env: The whole environment; by default this process's.
        text: The program's standard input.

    Raises:
        CommandError: The program is missing or exits with a nonzero code.
    """
    try:
        done = subprocess.run(  # noqa: S603 - only commands of this repository's own tools
            list(command), cwd=folder, env=env, input=text, check=False, capture_output=True, text=True
        )
    except FileNotFoundError as error:
        raise CommandError(f"{command[0]} is not installed") from error
    if done.returncode:
        raise CommandError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def git(root: Path, *arguments: str, text: str | None = None) -> str:
    """Run git in the repository ``root`` and return its output."""
    return run(["git", *arguments], root, text=text)
