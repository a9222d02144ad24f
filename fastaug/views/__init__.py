"""Views by one fused kernel: cuda/views.h on a CPU or a GPU."""

from fastaug.views.engine import choose_engine, engine_of, fused_engine, make_views, plan_views
from fastaug.views.form import ViewForm, form_of

__all__ = [
    "ViewForm",
    "choose_engine",
    "engine_of",
    "form_of",
    "fused_engine",
    "make_views",
    "plan_views",
]
