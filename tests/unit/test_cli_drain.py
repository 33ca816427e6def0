"""`flexslurm drain` and `cordon`: what each asks the head for."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from flexslurm.cli.shift_commands import cordon, drain
from flexslurm.messages import AskDone, CordonAsk, DrainAsk, Message
from flexslurm.wire.service_dir import ServiceDir


@pytest.mark.parametrize(
    ("command", "options", "question"),
    [
        (drain, (), DrainAsk(fragment="a-1")),
        (drain, ("--undo",), CordonAsk(fragment="a-1", cordon=False)),
        (cordon, (), CordonAsk(fragment="a-1", cordon=True)),
        (cordon, ("--undo",), CordonAsk(fragment="a-1", cordon=False)),
    ],
)
def test_what_is_asked(
    command: object,
    options: tuple[str, ...],
    question: Message,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Message] = []

    def ask(directory: ServiceDir, message: Message, timeout_s: float) -> AskDone:
        asked.append(message)
        return AskDone(message="a-1 had ended: it is started again")

    monkeypatch.setattr("flexslurm.cli.ask.ask", ask)
    directory = ServiceDir(tmp_path / "service")
    directory.create()
    directory.service.write_text("name: chat\n")
    arguments = ["a-1", *options, "--service-dir", str(directory.path)]
    done = CliRunner().invoke(command, arguments)  # type: ignore[arg-type]
    assert done.exit_code == 0, done.output
    assert asked == [question] and done.output == "a-1 had ended: it is started again\n"
