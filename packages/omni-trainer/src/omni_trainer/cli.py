"""The `omni` command: reads its arguments, and imports what a command needs only when it runs.

Exit codes: 0 done, 1 the run or a check failed, 2 wrong usage or configuration, 130 interrupted
(Ctrl-C), 143 terminated (SIGTERM), a run saved before. A user's mistake is answered with sentences, without a traceback; a
failed worker with its own traceback first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from omni_trainer._version import __version__
from omni_trainer.commands.interruption import terminable
from omni_trainer.stopping import told

OK, FAILED, USAGE = 0, 1, 2

Command = Callable[[argparse.Namespace], int]

_EPILOG = """\
exit codes: 0 done, 1 the run or a check failed, 2 wrong usage or configuration,
            130 interrupted (Ctrl-C), 143 terminated (SIGTERM)

  omni recipes                                what can be trained
  omni models                                 the model families, and what each supports
  omni config show quickstart                 every value and where it comes from
  omni train quickstart trainer.steps=10      train a recipe, with a value changed
  omni train my_run.yaml                      train from a file of your own
"""
_OVERRIDES = "dotted.key=value, over what the recipe or the file says; the value is read as YAML"


def _train(args: argparse.Namespace) -> int:
    from omni_trainer.commands import training

    return training.train(args.source, args.overrides)


def _resume(args: argparse.Namespace) -> int:
    from omni_trainer.commands import training

    return training.resume(args.run)


def _eval(args: argparse.Namespace) -> int:
    from omni_trainer.commands import training

    return training.evaluate(args.run, step=args.step)


def _export(args: argparse.Namespace) -> int:
    from omni_trainer.commands import training

    return training.export(
        args.run, step=args.step, output=args.output, merged=args.merged, policy=args.policy
    )


def _show(args: argparse.Namespace) -> int:
    from omni_trainer.commands import configs

    return configs.show(args.source, args.overrides, as_yaml=args.yaml)


def _validate(args: argparse.Namespace) -> int:
    from omni_trainer.commands import configs

    return configs.validate(args.source, args.overrides)


def _describe(args: argparse.Namespace) -> int:
    from omni_trainer.commands import configs

    return configs.describe(args.wanted)


def _completion(args: argparse.Namespace) -> int:
    import shtab

    sys.stdout.write(shtab.complete(build_parser(), shell=args.shell) + "\n")
    return OK


def _recipes(args: argparse.Namespace) -> int:
    del args
    from omni_trainer.commands import catalogue

    return catalogue.recipes()


def _models(args: argparse.Namespace) -> int:
    del args
    from omni_trainer.commands import models

    return models.models()


def _plugins(args: argparse.Namespace) -> int:
    from omni_trainer.commands import catalogue

    return catalogue.plugins(load=args.load)


def _report(args: argparse.Namespace) -> int:
    from omni_trainer.commands import report

    return report.report(args.run, output=args.output)


def _metrics(args: argparse.Namespace) -> int:
    from omni_trainer.commands import metrics

    return metrics.metrics(args.text, markdown=args.markdown)


def _check_data(args: argparse.Namespace) -> int:
    from omni_trainer.commands import data

    return data.check(
        args.source,
        args.overrides,
        tokenizer=args.tokenizer,
        max_tokens=args.max_tokens,
        strict=args.strict,
    )


def _doctor(args: argparse.Namespace) -> int:
    if args.run is not None:
        from omni_trainer.commands import diagnosis

        return diagnosis.examine(args.run)
    from omni_trainer import doctor

    return doctor.run()


def _with_source(
    parser: argparse.ArgumentParser, command: Command, more: str = ""
) -> argparse.ArgumentParser:
    said = f"a recipe's name (omni recipes) or a YAML file{more}"
    parser.add_argument("source", metavar="RECIPE|FILE", help=said)
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=_OVERRIDES)
    parser.set_defaults(command=command)
    return parser


def _with_data_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    said = "count tokens with the tokenizer in this directory (default: the run's model)"
    parser.add_argument("--tokenizer", metavar="DIR", help=said)
    said = "tokens that are read (default: the tokenizer's own number)"
    parser.add_argument("--max-tokens", type=int, metavar="N", help=said)
    parser.add_argument("--strict", action="store_true", help="let warnings fail the check too")
    return parser


def _with_run(parser: argparse.ArgumentParser, command: Command) -> argparse.ArgumentParser:
    parser.add_argument("run", metavar="RUN", help="the directory of a run")
    parser.set_defaults(command=command)
    return parser


def _with_step(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    said = "the checkpoint of this step (default: the newest complete one)"
    parser.add_argument("--step", type=int, metavar="N", help=said)
    return parser


Add = Callable[[str, str], argparse.ArgumentParser]
"""(name, what it does) -> the parser of a command."""


def _adder(parser: argparse.ArgumentParser) -> Add:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    return lambda name, said: commands.add_parser(
        name, help=said, description=said, allow_abbrev=False
    )


def _add_runs(add: Add) -> None:
    _with_source(add("train", "Start a run from a recipe or a file."), _train)
    _with_run(add("resume", "Go on from the newest complete checkpoint of a run."), _resume)
    _with_step(_with_run(add("eval", "Score a checkpoint on the held-out prompts."), _eval))
    export = _with_step(
        _with_run(add("export", "Write a checkpoint's LoRA or pipeline for diffusers."), _export)
    )
    export.add_argument("--output", metavar="DIR", help="where to (default: export/ in the run)")
    export.add_argument(
        "--merged",
        action="store_true",
        help="a whole pipeline, the LoRA merged (always so where every weight was trained)",
    )
    export.add_argument(
        "--policy",
        metavar="NAME",
        help="which of the run's policies: default (the trained one), ema, ... (default: the one that "
        "evaluation.policy names)",
    )


def _add_configs(add: Add) -> None:
    config = add("config", "Look at a configuration without starting anything.")
    kinds = config.add_subparsers(metavar="COMMAND", required=True)
    show = kinds.add_parser("show", help="every value and where it comes from", allow_abbrev=False)
    _with_source(show, _show).add_argument(
        "--yaml", action="store_true", help="as YAML that `omni train` takes, without the sources"
    )
    said = "name every mistake at once"
    _with_source(kinds.add_parser("validate", help=said, allow_abbrev=False), _validate)

    describe = kinds.add_parser(
        "describe",
        help="what may be set: type, default and meaning of each key",
        allow_abbrev=False,
    )
    describe.add_argument(
        "wanted",
        metavar="KEY|PLUGIN",
        nargs="?",
        help="only keys below this path (optimizer), or of this plugin (flow_grpo)",
    )
    describe.set_defaults(command=_describe)


def _add_data(add: Add) -> None:
    data = add("data", "Look at prompt files without starting anything.")
    kinds = data.add_subparsers(metavar="COMMAND", required=True)
    said = "rows, lengths, targets, repeats, bad rows, and prompts that are in both files"
    check = kinds.add_parser("check", help=said, allow_abbrev=False)
    _with_data_options(_with_source(check, _check_data, ", or a file of prompts"))


def _add_listings(add: Add) -> None:
    add("recipes", "List what can be trained.").set_defaults(command=_recipes)
    add("models", "List model families and what each supports.").set_defaults(command=_models)
    listing = add("plugins", "List installed plugins and the packages that they come from.")
    listing.add_argument(
        "--load", action="store_true", help="also import every implementation, to find broken ones"
    )
    listing.set_defaults(command=_plugins)
    metrics = add("metrics", "Say what each metric means, its unit and what is healthy.")
    metrics.add_argument("text", nargs="?", default="", help="part of a metric's name")
    metrics.add_argument("--markdown", action="store_true", help="as docs/metrics.md has it")
    metrics.set_defaults(command=_metrics)


def _add_reports(add: Add) -> None:
    page = _with_run(
        add("report", "Write a run as one HTML file, in whatever state it is."), _report
    )
    page.add_argument("-o", "--output", metavar="FILE", help="default: report.html in the run")
    said = "Check this machine, or say why a run stopped or did not learn."
    doctor = add("doctor", said)
    doctor.add_argument("run", metavar="RUN", nargs="?", help="the directory of a run")
    doctor.set_defaults(command=_doctor)
    completion = add("completion", "Print a script that completes commands and options in a shell.")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(command=_completion)


def build_parser() -> argparse.ArgumentParser:
    """Describe every command; imports nothing of what they do."""
    parser = argparse.ArgumentParser(
        prog="omni",
        description="RL post-training for diffusion, flow-matching and omni-modality models.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"omni {__version__}")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="log what happens, not only what went wrong"
    )
    add = _adder(parser)
    _add_runs(add)
    _add_configs(add)
    _add_data(add)
    _add_listings(add)
    _add_reports(add)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest:
        # `--lr=1` and `+key=1` are overrides in other tools: say what they are here.
        takes = "overrides" in args
        hint = "; an override is written key=value" if takes else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    command: Command = args.command
    try:
        from omni_core.log import configure

        configure(level="info" if args.verbose else "warning")
        with terminable():
            return command(args)
    except KeyboardInterrupt as exc:
        said, code = told(exc)
        sys.stderr.write(f"{said}\n")
        return code
    except BrokenPipeError:
        # The reader of a pipe (head, less) has seen enough.
        sys.stderr.close()
        return OK
    except Exception as exc:  # noqa: BLE001 -- the command's last frame: every error ends here
        from omni_trainer.commands.failures import report

        return report(exc)


if __name__ == "__main__":
    sys.exit(main())
