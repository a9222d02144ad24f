from __future__ import annotations

from fastaug.diagnostics.gpu_report.results import GpuReport


def write_page(report: GpuReport) -> str:
    return "<html></html>"
