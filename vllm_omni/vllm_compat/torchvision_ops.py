"""torchvision imports although its compiled part cannot load.

Why:      vLLM's CPU build brings a torchvision that wants CUDA libraries. Its import fails on an
          undefined operator, and with it every model class of transformers. The pure Python
          transforms, all that image and video processors need, work once the operators exist.
Why not a subclass: the failure is in an import, in every process, before any plugin runs; so the
          set-up writes a `.pth` file that installs this import hook at interpreter start.
Breaks if: torchvision adds operators that it registers without looking whether they exist.
Remove when: the CPU wheels of vLLM depend on a torchvision that matches their torch.

Does nothing until torchvision is imported, and nothing then where its compiled part loads.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import site
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

PTH_NAME: Final = "vllm_omni_torchvision.pth"
_PTH_LINE: Final = (
    "import sys; sys.meta_path.insert(0, type('TorchvisionGuard', (), {'find_spec': staticmethod("
    "lambda name, path=None, target=None: name == 'torchvision' "
    "and __import__('importlib.util').util.find_spec('vllm_omni') "
    "and __import__('vllm_omni.vllm_compat.torchvision_ops', fromlist=['TorchvisionFinder'])"
    ".TorchvisionFinder().find_spec(name, path, target) or None)}))\n"
)
"""Runs at every start of this environment's Python, so it imports nothing until it has to."""

_ROI: Final = "Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width"
_ROI_GRAD: Final = "float spatial_scale, int pooled_height, int pooled_width"
_SIZES: Final = "int batch_size, int channels, int height, int width"
_CONV: Final = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
    "SymInt groups, SymInt offset_groups, bool use_mask"
)
SCHEMAS: Final = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_ROI}, int sampling_ratio, bool aligned) -> Tensor",
    "qroi_align(Tensor input, Tensor rois, float input_scale, int input_zero_point, "
    "float rois_scale, int rois_zero_point, float spatial_scale, int pooled_height, "
    "int pooled_width, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool({_ROI}) -> (Tensor, Tensor)",
    f"ps_roi_align({_ROI}, int sampling_ratio) -> (Tensor, Tensor)",
    f"ps_roi_pool({_ROI}) -> (Tensor, Tensor)",
    f"deform_conv2d({_CONV}) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_ROI_GRAD}, {_SIZES}, int sampling_ratio, "
    "bool aligned) -> Tensor",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_ROI_GRAD}, {_SIZES}) -> Tensor",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_ROI_GRAD}, "
    f"int sampling_ratio, {_SIZES}) -> Tensor",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_ROI_GRAD}, "
    f"{_SIZES}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {_CONV}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
"""torchvision's operators, as its Python side calls them."""

_library: list[object] = []


def define_missing_operators(package_dir: Path) -> bool:
    """Define torchvision's operators when its compiled part cannot load; True when needed."""
    import torch

    try:
        torch.ops.load_library(package_dir / "_C.so")
    except OSError:
        pass
    else:
        return False
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    _library.append(library)  # definitions live as long as the object does
    return True


class _Loader(importlib.abc.Loader):
    """Runs `define_missing_operators`, then the real loader."""

    def __init__(self, loader: importlib.abc.Loader, package_dir: Path) -> None:
        self._loader = loader
        self._package_dir = package_dir

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        define_missing_operators(self._package_dir)
        module.__loader__ = self._loader
        self._loader.exec_module(module)


class TorchvisionFinder(importlib.abc.MetaPathFinder):
    """Wraps the loader of the top-level package `torchvision`; blind to every other name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None and spec.origin is not None:
            spec.loader = _Loader(spec.loader, Path(spec.origin).parent)
        return spec


def install() -> None:
    """Put the hook in front of the import path. Repeatable, free of heavy imports."""
    if not any(isinstance(finder, TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFinder())


def pth_path(site_dir: Path | None = None) -> Path:
    """Where the hook of this environment lies."""
    return (site_dir or Path(site.getsitepackages()[0])) / PTH_NAME


def write_pth(site_dir: Path | None = None) -> bool:
    """Install the hook in every process of this environment; False when it is there already."""
    path = pth_path(site_dir)
    if path.exists() and path.read_text() == _PTH_LINE:
        return False
    new = path.with_suffix(".new")
    new.write_text(_PTH_LINE)
    new.replace(path)  # processes that start now read either the old line or the new one
    return True


if __name__ == "__main__":
    write_pth()
