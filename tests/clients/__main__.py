"""`make test-clients`: real clients, each in an environment of its own, run their ordinary examples against a server.

`python -m tests.clients [NAME ...]`; the environments stay in
.venv/clients, or in CLIENTS_FOLDER. What cannot be installed is listed with its
error. Exit status 1 where an example failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
ENVIRONMENTS = Path(os.environ.get("CLIENTS_FOLDER", ROOT / ".venv" / "clients"))
MODEL = "smollm2"
LIMIT = 600  # seconds of an example
CLIENTS = {  # name: packages, and the example
    "openai": (["openai"], "use_openai.py"),
    "anthropic": (["anthropic"], "use_anthropic.py"),
    "litellm": (["litellm"], "use_litellm.py"),
    "langchain-openai": (["langchain-openai"], "use_langchain.py"),
    "instructor": (["instructor"], "use_instructor.py"),
    "pydantic-ai": (["pydantic-ai"], "use_pydantic_ai.py"),
    "smolagents": (["smolagents[openai]"], "use_smolagents.py"),
    "llm": (["llm"], "use_llm.sh"),
    "guidellm": (["guidellm"], "use_guidellm.sh"),
    "aiperf": (["aiperf"], "use_aiperf.sh"),
    "lm-eval": (["lm-eval[api]", "transformers"], "use_lm_eval.sh"),
    "node-openai": (["openai"], "use_node_openai.mjs"),
    "node-ai": (["ai", "@ai-sdk/openai-compatible"], "use_node_ai.mjs"),
}


def call(*command: object, check: bool = False, **more: object) -> subprocess.CompletedProcess[str]:
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **more}
    return subprocess.run([str(part) for part in command], check=check, **told)


def installed(name: str) -> tuple[Path, str]:
    """A client's environment and version; RuntimeError with the installer's last line where it cannot be had."""
    packages, example = CLIENTS[name]
    place = ENVIRONMENTS / name
    place.mkdir(parents=True, exist_ok=True)
    if example.endswith(".mjs"):
        if not (place / "node_modules" / packages[0]).exists():
            done = call("npm", "install", "--no-audit", "--no-fund", *packages, cwd=place)
            if done.returncode:
                raise RuntimeError(last_line(done.stdout))
        told = call("npm", "ls", "--depth=0", packages[0], cwd=place).stdout
        return place, re.findall(rf"{packages[0]}@(\S+)", told)[0]
    python = place / "bin" / "python"
    if not python.exists():
        call(sys.executable, "-m", "venv", place, check=True)
    package = packages[0].partition("[")[0]
    version = f"import importlib.metadata as m; print(m.version({package!r}))"
    if call(python, "-c", version).returncode:
        done = call(python, "-m", "pip", "install", "--quiet", *packages)
        if done.returncode:
            raise RuntimeError(last_line(done.stdout))
    return place, call(python, "-c", version).stdout.strip()


def last_line(text: str) -> str:
    return ([line for line in text.splitlines() if line.strip()] or ["no output"])[-1]


def example_of(name: str, place: Path, base: str, tokenizer: Path) -> subprocess.CompletedProcess[str]:
    """Run a client's example."""
    file = CLIENTS[name][1]
    with tempfile.TemporaryDirectory() as folder:
        told = {"BASE": base, "MODEL": MODEL, "FOLDER": folder, "TOKENIZER": str(tokenizer), "BIN": str(place / "bin")}
        more = {"env": os.environ | told, "timeout": LIMIT}
        if file.endswith(".mjs"):  # modules are looked for beside the file
            (place / file).write_text((HERE / file).read_text())
            return call("node", place / file, **more)
        return call("bash" if file.endswith(".sh") else place / "bin" / "python", HERE / file, **more)


def main(names: list[str]) -> int:
    """The rows of a table, and the exit status."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, port = Path(folder) / "tokenizer", 8765
        call(sys.executable, "-m", "selfspec", "inspect", MODEL, "--save-tokenizer", tokenizer, check=True, cwd=ROOT)
        serve = [sys.executable, "-m", "selfspec", "serve", MODEL, "--port", str(port), "--quiet"]
        base = f"http://127.0.0.1:{port}"
        with subprocess.Popen(serve, cwd=ROOT) as server:
            try:
                wait_for(base)
                for name in names:
                    start = time.monotonic()
                    try:
                        place, version = installed(name)
                    except RuntimeError as problem:
                        print(f"| {name} | not installed | {problem} |", flush=True)
                        continue
                    done = example_of(name, place, base, tokenizer)
                    failed += done.returncode != 0
                    says = "passes" if done.returncode == 0 else f"FAILS: {last_line(done.stdout)}"
                    print(f"| {name} | {version} | {says} | {time.monotonic() - start:.0f} s", flush=True)
                    if done.returncode:
                        print(done.stdout[-3000:], file=sys.stderr)
            finally:
                server.terminate()
    return int(failed > 0)


def wait_for(base: str) -> None:
    for _ in range(240):
        try:
            if httpx.get(base + "/health").status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise SystemExit("the server did not come up")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:] or list(CLIENTS)))
