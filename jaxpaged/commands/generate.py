"""``jaxpaged generate``: a job from a file, or one prompt streamed to the terminal."""

import argparse
import sys
from typing import Any

from jaxpaged.batch.config import load_job, parse_override
from jaxpaged.batch.job import run_job
from jaxpaged.batch.summary import JobSummary
from jaxpaged.commands.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_SIGNAL_BASE, EXIT_SOME_FAILED
from jaxpaged.commands.flags import DEFAULT_MAX_TOKENS, ENGINE, SAMPLING, add_engine_flags, add_sampling_flags, given_flags
from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError
from jaxpaged.sampling_params import SamplingParams

EPILOG = """\
examples:
  jaxpaged generate --config job.yaml
  jaxpaged generate --config job.yaml --set engine.page_size=32 --set sampling.temperature=0
  jaxpaged generate --config job.yaml --resume
  jaxpaged generate --model model.gguf --prompt "The capital of France is" --temperature 0
  jaxpaged generate --model ./llama --chat --prompt "Why is the sky blue?" --max-tokens 200

a job file:
  model: ./llama
  engine: {max_num_seqs: 64, enable_prefix_caching: true}
  sampling: {temperature: 0.7, max_tokens: 200}
  input: {path: prompts.jsonl}          # format: auto, jsonl, text or openai
  output: {path: out/answers.jsonl}     # beside it: .manifest.json and .pool.png

input lines (jsonl):
  {"id": "a", "prompt": "Once upon a time", "max_tokens": 40}
  {"id": "b", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
  {"id": "c", "prompt_token_ids": [1, 9690, 198]}

exit codes:
  0    every request has its result
  1    the job or the model failed (message on stderr; a job can be resumed)
  2    wrong flags or a wrong config
  3    the job ended, but some records are errors (the summary counts them)
  130  stopped by SIGINT, 143 by SIGTERM; --resume goes on
"""


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parser."""
    parser = commands.add_parser(
        "generate",
        help="run a job file, or one prompt",
        description="Generates completions: for every line of a job's input file, or for one prompt given here.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    job = parser.add_argument_group("a job")
    job.add_argument("--config", metavar="FILE", help="the job file (YAML)")
    job.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override a key of the file, e.g. engine.page_size=32",
    )
    job.add_argument("--resume", action="store_true", help="go on where an earlier run of the same job stopped")
    job.add_argument("--overwrite", action="store_true", help="throw an existing output away and start over")
    job.add_argument("--quiet", action="store_true", help="no progress and no summary")
    one = parser.add_argument_group("one prompt")
    one.add_argument("--model", metavar="MODEL", help="a Hugging Face directory, a .gguf file, an Orbax checkpoint or a hub id")
    one.add_argument("--prompt", metavar="TEXT", help="the prompt; '-' reads it from standard input")
    one.add_argument("--chat", action="store_true", help="send the prompt as a user's message through the chat template")
    one.add_argument("--system", metavar="TEXT", help="a system message before it (with --chat)")
    add_engine_flags(parser)
    add_sampling_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    if args.config is not None and args.prompt is not None:
        raise ConfigError("--config and --prompt: give one of them")
    if args.config is not None:
        for name in ("chat", "system"):
            if getattr(args, name):
                raise ConfigError(f"--{name}: belongs to --prompt; in a job write messages into the input lines")
        return _run_file(args)
    if args.prompt is None:
        raise ConfigError('generate: wants --config FILE, or --model MODEL --prompt "..." (see jaxpaged generate --help)')
    for name in ("set", "resume", "overwrite"):
        if getattr(args, name):
            raise ConfigError(f"--{name}: belongs to --config")
    return _run_prompt(args)


def _run_file(args: argparse.Namespace) -> int:
    overrides = dict(parse_override(text) for text in args.set)
    overrides |= {"engine." + name: value for name, value in given_flags(args, ENGINE).items()}
    overrides |= {"sampling." + name: value for name, value in given_flags(args, SAMPLING).items()}
    if args.model is not None:
        overrides["model"] = args.model
    job = load_job(args.config, overrides)
    summary = run_job(
        job,
        lambda: _engine(job.engine, progress=not args.quiet),
        resume=args.resume,
        overwrite=args.overwrite,
        quiet=args.quiet,
    )
    if not args.quiet:
        print(summary.text())
    return report(summary, overwrite=args.overwrite)


def report(summary: JobSummary, *, overwrite: bool = False) -> int:
    """Tells on stderr how a job ended, where that is not the ordinary way.

    Args:
        summary: what was done.
        overwrite: whether an earlier output was to be thrown away, which happens once the model is loaded.

    Returns:
        The exit code.
    """
    if summary.interrupted is not None:
        name = {2: "SIGINT", 15: "SIGTERM"}.get(summary.interrupted, f"signal {summary.interrupted}")
        how = f"after {summary.done} of {summary.total} records; go on with --resume"
        if overwrite and summary.stats is None:
            how = "before anything was written; an earlier output is as it was, start over with --overwrite"
        print(f"stopped by {name} {how}", file=sys.stderr)
        return EXIT_SIGNAL_BASE + summary.interrupted
    if not summary.complete:
        print(
            f"error: {summary.done} of {summary.total} records: the input file was changed while the job ran; run again with "
            "--overwrite",
            file=sys.stderr,
        )
        return EXIT_FAILED
    return EXIT_SOME_FAILED if summary.errors else EXIT_OK


def _run_prompt(args: argparse.Namespace) -> int:
    if args.model is None:
        raise ConfigError("--model: missing; wants a Hugging Face directory, a .gguf file, an Orbax checkpoint or a hub id")
    if args.system and not args.chat:
        raise ConfigError("--system: wants --chat")
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    prompt: Any = text
    if args.chat:
        system = [{"role": "system", "content": args.system}] if args.system else []
        prompt = {"messages": [*system, {"role": "user", "content": text}]}
    params = SamplingParams.from_dict({"max_tokens": DEFAULT_MAX_TOKENS, **given_flags(args, SAMPLING)})
    if params.logprobs is not None:
        raise ConfigError("--logprobs: belongs to --config; of a prompt only the text is printed")
    small = {"max_num_seqs": params.num_samples, "max_num_batched_tokens": 512}  # few shapes to compile for one prompt
    config = EngineConfig.from_dict({**small, "model": args.model, **given_flags(args, ENGINE)})
    engine = _engine(config, progress=True)
    engine.add_request("prompt", prompt, params)
    stream(engine, sys.stdout)
    return EXIT_OK


def stream(engine: Any, out: Any) -> None:
    """Runs the engine's one request and writes its text as it comes; several samples follow one another when all are done.

    Args:
        engine: with one request queued.
        out: a text stream.
    """
    shown, outputs = "", []
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs = output.outputs
            if len(outputs) == 1 and outputs[0].text.startswith(shown):
                out.write(outputs[0].text[len(shown) :])
                out.flush()
                shown = outputs[0].text
    if len(outputs) > 1:
        for sample in outputs:
            out.write(f"--- {sample.index}\n{sample.text}\n")
    else:
        out.write("\n")
    out.flush()


def _engine(config: EngineConfig, *, progress: bool = False) -> Any:
    from jaxpaged.engine.engine import Engine  # loads JAX: only when something is generated

    if progress and not sys.stderr.isatty():
        print(f"loading {config.model} and compiling its programs (minutes the first time, then cached)", file=sys.stderr)
    return Engine(config, progress=progress and sys.stderr.isatty())
