"""A transformers model: forked if an instance runs it, otherwise loaded.

    rfork planner &
    python pretrained.py HuggingFaceTB/SmolLM2-135M-Instruct --planner http://127.0.0.1:8700 --stay &
    python pretrained.py HuggingFaceTB/SmolLM2-135M-Instruct --planner http://127.0.0.1:8700

The first process reads the checkpoint, as `from_pretrained` does. The second forks from it, and reads only
the config and the tokenizer. Needs: pip install 'rfork[planner,transformers]'.
"""

from __future__ import annotations

import argparse
import signal

from transformers import AutoTokenizer

import rfork


def main() -> None:
    """Fork or load, and continue a prompt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a directory, or a model of the hub")
    parser.add_argument("--planner", help="URL of the planner [RFORK_PLANNER]")
    parser.add_argument("--name", help="name of the model; seeds and forks meet under it")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--stay", action="store_true", help="serve the weights to others until SIGTERM")
    options = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])

    # The only line that differs from a program without rfork:
    model = rfork.fork_pretrained(options.model, planner=options.planner, name=options.name)

    report = rfork.fork_report(model)
    print(report.line() if report is not None else "loaded by transformers", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompt = tokenizer(options.prompt, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    print(f"continued: {tokens[0].tolist()}", flush=True)
    if options.stay:
        signal.sigwait([signal.SIGTERM, signal.SIGINT])


if __name__ == "__main__":
    main()
