"""``autofit estimate METHOD --sweep NAME=VALUE,VALUE,...``: reads the axes, and makes a command line of every point."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from autotrain_mem import api
from autotrain_mem.cli.flags import Output, own_names, read_one
from autotrain_mem.report.terminal import Console, waiting
from autotrain_mem.settings.words import SAME_ARGUMENT
from autotrain_mem.support.errors import AutofitError, UsageError
from autotrain_mem.types.autofit import SETTINGS
from autotrain_mem.types.gpu_comparison import Axis, AxisValue, Sweep

_OF_PLANNING = tuple(name for name, each in SETTINGS.items() if each.of_estimate)
OURS = ("model", "dataset", *_OF_PLANNING)
"""Our own flags that an estimate depends on; the first two are the request's, the others its AutoFit's."""

_SAME = {"model_name_or_path": "model", **SAME_ARGUMENT}
"""Two names of one flag."""

_FORM = "Write --sweep NAME=VALUE,VALUE,..., such as --sweep max_length=512,1024."

RehearsalsOf = Callable[[api.RunRequest], api.Rehearsals]


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenAxis:
    """An axis as it was typed."""

    name: str
    texts: tuple[str, ...]


def read_axes(output: Output) -> tuple[WrittenAxis, ...]:
    """The axes of the command line; no value is looked at yet.

    Raises UsageError: all that is wrong with them, in one message.
    """
    if output.csv and output.json:
        raise UsageError("--csv and --json exclude each other: stdout holds one of them.", hint="Remove one.")
    if output.sweep and output.snapshot is not None:
        raise UsageError(
            "--snapshot is the history of one configuration, and --sweep makes many.",
            hint="Remove one: the snapshot of a single point is autofit estimate with that point's flags.",
        )
    written = [text.partition("=") for text in output.sweep]  # ``max-length=4, 32``; a value written twice counts once
    axes = tuple(
        WrittenAxis(
            name=name.strip().lstrip("-").replace("-", "_"),
            texts=tuple(dict.fromkeys(value.strip() for value in values.split(","))),
        )
        for name, _, values in written
    )
    of_each_name = {_canonical(axis.name): axis for axis in axes}
    _raise_together([wrong for each in of_each_name.values() for wrong in _wrong(each, axes, output.typed)])
    if axes:
        api.check_size([len(axis.texts) for axis in axes])
    return axes


def run(
    workers: api.Workers, request: api.RunRequest, written: Sequence[WrittenAxis], rehearsals_of: RehearsalsOf
) -> Sweep:
    """Estimates all points, with a live line on stderr where that is a terminal.

    Raises:
        UsageError: a name that nobody knows, values that their flags refuse; all of them in one message.
        AutofitError: every point was refused; the error is the first one's.
    """
    with waiting(Console(stderr=True), "importing TRL"):
        axes = _typed_axes(workers.first, request.method, written)
    asked = [_asked(request, axes, settings, rehearsals_of) for settings in api.combinations(axes)]
    done = count(1)
    with waiting(Console(stderr=True), "rehearsing") as say:
        return api.estimate_all(
            workers,
            axes,
            asked,
            lambda point: api.estimate(point, checks=False),
            lambda point: say(f"rehearsing, {next(done)} of {len(asked)}"),
        )


def _canonical(name: str) -> str:
    return _SAME.get(name, name)


def _wrong(axis: WrittenAxis, axes: Sequence[WrittenAxis], argv: Sequence[str]) -> Iterator[UsageError]:
    """Yields all that is wrong with an axis, as far as that is known without TRL's flags."""
    name = axis.name
    if not name or not all(axis.texts):
        written = f"--sweep {name}={','.join(axis.texts)}"
        yield UsageError(f"{written}: {'a value is empty' if name else 'the name is missing'}.", hint=_FORM)
    if sum(_canonical(each.name) == _canonical(name) for each in axes) > 1:
        yield UsageError(f"--sweep {name} is given twice.", hint="Write all its values into one --sweep.")
    # A key of the YAML file is no contradiction: flags win over it, swept or not.
    typed = [token.partition("=")[0] for token in argv if token.startswith("--")]
    flags = {_canonical(flag[2:].replace("-", "_").removeprefix("no_")): flag for flag in typed}
    if (given := flags.get(_canonical(name))) is not None:
        hint = f"Remove {given}, or add its value to the sweep."
        yield UsageError(f"{given} is given, and {name} is swept.", hint=hint)
    if name in own_names("autofit estimate") and name not in OURS:
        hint = f"Beside TRL's flags it takes {', '.join(OURS)}."
        yield UsageError(f"--sweep {name}: no estimate depends on --{name}.", hint=hint)


def _raise_together(wrong: Sequence[UsageError]) -> None:
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        hints = dict.fromkeys(line for each in wrong for line in each.hint.splitlines())
        raise UsageError(" ".join(dict.fromkeys(each.message for each in wrong)), hint="\n".join(hints))


def _typed_axes(worker: api.Worker, method: str, written: Sequence[WrittenAxis]) -> tuple[Axis, ...]:
    """Reads every value with its flag's parser, each alone: combinations are checked later."""
    axes, wrong = [], []
    for axis in written:
        settings = []
        for text in axis.texts:
            try:
                if axis.name in OURS:
                    value = read_one(f"autofit estimate {method}", axis.name, text)
                else:
                    value = worker.read_value(method, axis.name, _tokens(axis.name, text), own_names())
                settings.append(AxisValue(name=axis.name, text=text, value=value))
            except UsageError as error:
                wrong.append(error)
        axes.append(Axis(name=axis.name, settings=tuple(settings)))
    _raise_together(list({each.message: each for each in wrong}.values()))  # an unknown name is so with every value
    return tuple(axes)


def _tokens(name: str, text: str) -> list[str]:
    """``lora_target_modules=q_proj v_proj`` is one value of two words, as on the command line."""
    words = shlex.split(text) if " " in text else [text]
    return [f"--{name}={text}"] if len(words) == 1 else [f"--{name}", *words]


def _asked(
    request: api.RunRequest, axes: Sequence[Axis], settings: Sequence[AxisValue], rehearsals_of: RehearsalsOf
) -> api.Rehearsals | AutofitError:
    """The point as if it had been typed by itself; what TRL's parser refuses of it is the point's refusal."""
    for axis, setting in zip(axes, settings, strict=True):
        if axis.name in _OF_PLANNING:
            request = replace(request, autofit=replace(request.autofit, **{axis.name: setting.value}))
        elif axis.name in OURS:
            request = replace(request, **{axis.name: setting.value})
        else:
            request = replace(request, argv=(*request.argv, *_tokens(axis.name, setting.text)))
    try:
        return rehearsals_of(request)
    except UsageError as refusal:
        return refusal
