"""A transformers model, forked where somebody runs it, loaded where nobody does.

    rfork planner &
    python pretrained.py HuggingFaceTB/SmolLM2-135M-Instruct --planner http://127.0.0.1:8700 --stay &
    python pretrained.py HuggingFaceTB/SmolLM2-135M-Instruct --planner http://127.0.0.1:8700

The first reads the checkpoint, as `from_pretrained` would; the second forks from it, and needs of the model's
folder nothing but the config and the tokenizer. Needs: pip install 'rfork[transformers]'.
"""

from __future__ import annotations

import argparse
import signal

from transformers import AutoTokenizer

import rfork


def main() -> None:
    """Fork or load, and continue a prompt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a folder, or a model of the hub")
    parser.add_argument("--planner", help="URL of the planner [RFORK_PLANNER]")
    parser.add_argument("--name", help="name of the model; seeds and forks meet under it")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--stay", action="store_true", help="give the weights onwards until SIGTERM")
    options = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])

    # The one line that differs from a program without rfork:
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
