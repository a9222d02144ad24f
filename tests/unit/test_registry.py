"""Which kernel a name means, and which kernels are let in."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from expect import raises
from torch import Tensor

import fastaug
from fastaug.errors import ConfigError, KernelUnavailableError
from fastaug.kernels import admission, registry
from fastaug.kernels.config import Average
from fastaug.kernels.contract import average_code
from fastaug.kernels.objective import image_kl, loss_terms
from fastaug.kernels.reference import ReferenceKernel
from fastaug.toolchain.build import source_folder

Change = Callable[[Tensor, Tensor, Any], tuple]


class Changed(ReferenceKernel):
    """The reference, with something changed in what it returns."""

    name = "changed"

    def __init__(self, change: Change) -> None:
        self.change = change

    def value_and_grad(self, *args, **kwargs):
        return self.change(*super().value_and_grad(*args, **kwargs))


class Plain(ReferenceKernel):
    name = "plain"
    soft_targets = False

    def sources(self) -> list[Path]:
        return [Path(__file__)]


def scaled(values: float = 1, gradient: float = 1) -> Change:
    return lambda nll, kl, grad: (
        nll * values,
        kl * values,
        None if grad is None else grad * gradient,
    )


def check(kernel: Any, device: str = "cpu") -> Any:
    return fastaug.check_kernel(kernel, device)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))
    monkeypatch.setattr(registry, "_found", {})
    monkeypatch.setattr(registry, "_logged", set())


class TestNames:
    def test_a_registered_kernel_is_used_by_name(self) -> None:
        calls = []
        fastaug.register_kernel("mine", Changed(lambda *found: calls.append(1) or found))
        assert fastaug.available_kernels()["mine"] is None
        z, y = torch.randn(2, 3, 4, requires_grad=True), torch.tensor([0, 1])
        loss = fastaug.objective(z, y, kernel="mine").loss
        before = len(calls)
        fastaug.objective(z, y, kernel="mine")
        assert len(calls) == before + 1
        torch.testing.assert_close(loss, fastaug.objective(z, y, kernel="reference").loss)

    def test_by_module_and_attribute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "someones_kernel.py").write_text(
            "from fastaug.kernels.reference import ReferenceKernel\nkernel = ReferenceKernel()\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        z = torch.randn(2, 3, 4)
        kl = fastaug.pairwise_kl(z, kernel="someones_kernel:kernel")
        torch.testing.assert_close(kl, fastaug.pairwise_kl(z, kernel="reference"))

    def test_other_distributions_offer_kernels(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "their_kernel.py").write_text(
            "from fastaug.kernels.reference import ReferenceKernel\n"
            "class Theirs(ReferenceKernel):\n    name = 'theirs'\nkernel = Theirs()\n"
        )
        about = tmp_path / "theirs-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(
            "[fastaug.kernels]\ntheirs = their_kernel:kernel\nbroken = no_such_module:kernel\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        found = fastaug.available_kernels()
        assert found["theirs"] is None
        assert "No module named 'no_such_module'" in str(found["broken"])
        z = torch.randn(2, 3, 4)
        torch.testing.assert_close(
            fastaug.pairwise_kl(z, kernel="theirs"), fastaug.pairwise_kl(z, kernel="reference")
        )
        with raises(KernelUnavailableError, "broken"):
            fastaug.pairwise_kl(z, kernel="broken")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("referense", "referense"),
            ("no.such.module:kernel", "ModuleNotFoundError"),
            ("math:kernel", "math AttributeError"),
            ("math:pi", "value_and_grad"),
            ("fastaug.kernels.reference:ReferenceKernel", ""),
        ],
    )
    def test_an_unknown_kernel_says_why(self, name: str, message: str) -> None:
        with raises(KernelUnavailableError, message):
            fastaug.pairwise_kl(torch.zeros(1, 2, 3), kernel=name)

    def test_a_kernel_asked_for_by_name_never_falls_back(self) -> None:
        class Elsewhere(ReferenceKernel):
            name = "elsewhere"

            def supports(self, logits: Tensor) -> str:
                return "needs a CUDA device"

        fastaug.register_kernel("elsewhere", Elsewhere())
        assert fastaug.available_kernels()["elsewhere"] == "needs a CUDA device"
        with raises(KernelUnavailableError, "elsewhere CUDA"):
            fastaug.pairwise_kl(torch.zeros(1, 2, 3), kernel="elsewhere")
        assert fastaug.pairwise_kl(torch.zeros(1, 2, 3)).tolist() == [0.0]

    @pytest.mark.parametrize("name", ["auto", "a:b"])
    def test_reserved_names(self, name: str) -> None:
        with raises(KernelUnavailableError, name):
            fastaug.register_kernel(name, registry.load_kernel("reference"))

    def test_the_name_comes_first(self) -> None:
        with raises(KernelUnavailableError, "register_kernel(name"):
            fastaug.register_kernel(ReferenceKernel(), "mine")  # type: ignore[arg-type]

    @pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
    def test_available_on_a_device(self, device: str | torch.device) -> None:
        found = fastaug.available_kernels(device)
        assert found == fastaug.available_kernels(torch.zeros(2, 3, 4))
        assert found["reference"] is None
        assert "CUDA" in str(found["cuda"])

    @pytest.mark.parametrize("ask", [fastaug.available_kernels, partial(check, "reference")])
    def test_a_device_that_is_not_here(
        self, ask: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with raises(ConfigError, "device gpu"):
            ask("gpu")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with raises(ConfigError, "device cuda:1"):
            ask("cuda:1")

    def test_available_for_logits_of_another_shape(self) -> None:
        with raises(ConfigError, "logits [6 4]"):
            fastaug.available_kernels(torch.zeros(6, 4))

    def test_one_whose_supports_raises_does_not_hide_the_others(self) -> None:
        class Broken(ReferenceKernel):
            name = "broken"

            def supports(self, logits: Tensor) -> str | None:
                raise ZeroDivisionError("no")

        fastaug.register_kernel("broken", Broken())
        found = fastaug.available_kernels()
        assert found["broken"] == "ZeroDivisionError: no"
        assert found["reference"] is None


class Nothing:
    """Not a kernel."""


class WithoutSupports:
    name = "unsupported"

    def value_and_grad(self, logits, targets, **settings): ...


class WithoutArguments(ReferenceKernel):
    name = "without_arguments"

    def supports(self) -> str | None:  # type: ignore[override]
        return None


class OldArguments(ReferenceKernel):
    name = "old_arguments"

    def value_and_grad(self, logits, targets, *, average): ...


NO_KERNELS = {
    "nothing": (Nothing(), "Nothing name supports value_and_grad"),
    "none": (None, "NoneType name supports value_and_grad"),
    "without supports": (WithoutSupports(), "unsupported supports"),
    "supports without arguments": (WithoutArguments(), "without_arguments supports(logits)"),
    "old arguments": (OldArguments(), "old_arguments kl_weight need_grad"),
    "a class": (Plain, "class Plain"),
}


class TestContract:
    @pytest.mark.parametrize("case", NO_KERNELS)
    @pytest.mark.parametrize(
        "use",
        [
            check,
            partial(fastaug.pairwise_kl, torch.zeros(1, 2, 3)),
            partial(fastaug.objective, torch.zeros(1, 2, 3), torch.zeros(1).long()),
        ],
    )
    def test_an_object_that_is_no_kernel(self, case: str, use: Callable) -> None:
        kernel, message = NO_KERNELS[case]
        with raises(KernelUnavailableError, message):
            use(kernel=kernel)

    @pytest.mark.parametrize("case", NO_KERNELS)
    def test_by_name(self, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel, _ = NO_KERNELS[case]
        with raises(KernelUnavailableError, "mine"):
            fastaug.register_kernel("mine", kernel)
        monkeypatch.setattr(sys.modules[__name__], "mine", kernel, raising=False)
        with raises(KernelUnavailableError, f"{__name__}:mine"):
            fastaug.pairwise_kl(torch.zeros(1, 2, 3), kernel=f"{__name__}:mine")


class TestAuto:
    def choose(
        self, monkeypatch: pytest.MonkeyPatch, *kernels: ReferenceKernel, calls: int = 3
    ) -> Tensor:
        monkeypatch.setattr(registry, "_OWN", (*kernels, registry._REFERENCE))
        shapes = [(1, 2, 3 + call) for call in range(calls)]
        return [fastaug.pairwise_kl(torch.ones(shape)) for shape in shapes][-1]

    def test_the_first_that_is_admitted_is_taken_and_said_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "fastaug"):
            self.choose(monkeypatch, Changed(scaled()))
        assert caplog.messages == ["loss kernel: changed"]

    def test_one_that_is_refused_is_passed_over_out_loud(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "fastaug"):
            assert self.choose(monkeypatch, Changed(scaled(values=1.01))).item() == 0
        refused, chosen = caplog.messages
        assert "'changed' on cpu: refused" in refused
        assert "x the tolerance" in refused
        assert chosen == "loss kernel: reference"

    def test_one_that_is_named_is_reported_too(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "fastaug"):
            fastaug.pairwise_kl(torch.ones(1, 2, 17), kernel=Changed(scaled()))
        assert caplog.messages == ["loss kernel: changed"]

    def test_float64_is_the_references(self) -> None:
        z = torch.zeros(1, 2, 3, dtype=torch.float64)
        assert registry.find_kernel("auto", z) is registry._REFERENCE

    def test_no_kernel_at_all(self) -> None:
        with raises(KernelUnavailableError, "torch.int64 logits"):
            fastaug.pairwise_kl(torch.zeros(1, 2, 3, dtype=torch.int64))


class Partial(ReferenceKernel):
    """Cannot average logits, and must not be asked to."""

    name = "partial"
    averages = ("losses", "probs")
    soft_targets = False

    def value_and_grad(self, logits: Tensor, targets: Tensor | None, **settings: Any):
        assert settings["average"] != "logits"
        return super().value_and_grad(logits, targets, **settings)


class TestAverages:
    def test_the_header_and_the_reference_have_all_of_them(self) -> None:
        header = (source_folder() / "objective.h").read_text()
        (enum,) = re.findall(r"enum Average \{(.+?)\};", header)
        names = [name.strip().lower() for name in enum.split(",")]
        compiled = re.findall(r"X\((\w+), (\w+), __VA_ARGS__\)", header)
        assert sorted(names) == sorted([*get_args(Average), "none"])
        assert compiled == [(name, name.upper()) for name in names]
        assert {code: average_code(code) for code in get_args(Average)} == {
            name: names.index(name) for name in get_args(Average)
        }
        assert average_code(None) == names.index("none")
        for name in ("native", "cuda"):
            assert registry.load_kernel(name).averages == get_args(Average)  # type: ignore[attr-defined]

    def test_a_kernel_without_an_average_is_passed_over(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        partial = Partial()
        monkeypatch.setattr(registry, "_OWN", (partial, registry._REFERENCE))
        form: dict = {"views": 2, "classes": 3, "device": torch.device("cpu")}
        chosen = {a: registry.resolve_kernel("auto", **form, average=a) for a in get_args(Average)}
        assert chosen == {"losses": partial, "probs": partial, "logits": registry._REFERENCE}
        assert registry.resolve_kernel("auto", **form) is partial  # the pairwise KL
        z, y = torch.randn(2, 2, 3), torch.tensor([0, 1])
        expected = fastaug.objective(z, y, average="logits", kernel="reference")
        torch.testing.assert_close(fastaug.objective(z, y, average="logits"), expected)

    def test_by_name_it_is_refused(self) -> None:
        z, y = torch.randn(2, 2, 3), torch.tensor([0, 1])
        assert fastaug.objective(z, y, average="probs", kernel=Partial()).loss > 0
        with pytest.raises(KernelUnavailableError, match=r"'partial'.*losses, probs.*logits"):
            fastaug.objective(z, y, average="logits", kernel=Partial())

    def test_only_its_averages_are_compared(self) -> None:
        report = fastaug.check_kernel(Partial())
        assert report.admitted
        assert 15 < report.cases < 29


class TestResolved:
    def test_a_resolved_kernel_is_used_without_another_lookup(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernel = registry.resolve_kernel(
            "reference", views=3, classes=4, device=torch.device("cpu"), average="probs"
        )
        z, y = torch.randn(2, 3, 4, requires_grad=True), torch.tensor([0, 1])
        settings: dict = {"average": "probs", "kl_weight": 0.3, "label_smoothing": 0.1}
        expected = fastaug.objective(z, y, kernel="reference", **settings)
        kl = fastaug.pairwise_kl(z, kernel="reference")
        monkeypatch.delattr(registry, "_found")
        found = loss_terms(kernel, z, y, **settings)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(image_kl(kernel, z), kl, rtol=0, atol=0)
        assert found.loss.requires_grad

    @pytest.mark.parametrize("name", ["nothing_of_the_kind", "cuda"])
    def test_one_that_cannot_be_used_is_refused(self, name: str) -> None:
        with pytest.raises(KernelUnavailableError, match=name):
            registry.resolve_kernel(name, views=2, classes=3, device=torch.device("cpu"))


class TestAdmission:
    def test_the_reference_in_fp32_is_far_within_the_tolerance(self) -> None:
        report = fastaug.check_kernel("reference")
        assert report.admitted
        assert report.cases == 29 + 24  # int64 and soft targets
        assert float(report.worst.split("off by ")[1].split()[0]) < 0.3

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (scaled(values=1.0005), "float32"),
            (scaled(gradient=1.03), "gradient"),
            (lambda nll, kl, grad: (nll, kl + 1e-7, grad), "kl"),
            (
                lambda nll, kl, grad: (nll, kl, grad if grad is None else grad * torch.nan),
                "gradient nan",
            ),
            (lambda nll, kl, grad: (nll * torch.nan, kl, grad), "nll nan"),
            (lambda nll, kl, grad: (nll, kl, None), "gradient"),
            (lambda nll, kl, grad: (nll.double(), kl, grad), "nll torch.float32"),
            (lambda nll, kl, grad: (nll, kl[:1], grad), "kl [3]"),
            (lambda nll, kl, grad: (nll, kl), "ValueError"),
            (lambda nll, kl, grad: 1 / 0, "ZeroDivisionError"),
        ],
    )
    def test_what_is_wrong_is_refused_with_the_case(self, change: Change, said: str) -> None:
        kernel = Changed(change)
        report = fastaug.check_kernel(kernel)
        assert not report.admitted
        with raises(KernelUnavailableError, f"changed cpu {said}"):
            fastaug.pairwise_kl(torch.zeros(1, 2, 3), kernel=kernel)

    def test_the_short_form_of_the_kl_is_refused(self) -> None:
        """sum p (z - mean z) is right on paper, and loses its digits where views nearly agree."""

        class Short(ReferenceKernel):
            name = "short"

            def value_and_grad(self, logits: Tensor, targets: Tensor | None, **settings: Any):
                nll, kl, grad = super().value_and_grad(logits, targets, **settings)
                z = logits.float()
                if z.shape[1] > 1:
                    kl = (z.softmax(-1) * (z - z.mean(1, keepdim=True))).sum((1, 2))
                    kl /= z.shape[1] - 1
                return nll, kl, grad

        assert "kl" in fastaug.check_kernel(Short()).worst

    def test_one_that_changes_the_logits_is_refused(self) -> None:
        class Vandal(ReferenceKernel):
            name = "vandal"

            def value_and_grad(self, logits: Tensor, targets: Tensor | None, **settings: Any):
                found = super().value_and_grad(logits, targets, **settings)
                logits += 1
                return found

        assert "modified the logits" in fastaug.check_kernel(Vandal()).worst

    def test_one_that_only_works_in_training_is_refused(self) -> None:
        class Trainee(ReferenceKernel):
            name = "trainee"

            def value_and_grad(self, logits: Tensor, targets: Tensor | None, **settings: Any):
                logits.detach().requires_grad_()
                return super().value_and_grad(logits, targets, **settings)

        assert "inference tensor" in fastaug.check_kernel(Trainee()).worst

    def test_a_wrong_mean_is_refused(self) -> None:
        class Meaner(ReferenceKernel):
            name = "meaner"

            def mean_and_grad(self, logits, targets, average, kl_weight, label_smoothing):
                settings = {"average": average, "kl_weight": kl_weight, "need_grad": True}
                settings["label_smoothing"] = label_smoothing
                nll, kl, grad = self.value_and_grad(logits, targets, **settings)
                return (nll + kl_weight * kl).mean(), nll, kl, grad  # not divided by B

        assert "gradient of mean_and_grad off by" in fastaug.check_kernel(Meaner()).worst

    def test_a_mean_that_is_recorded_is_refused(self) -> None:
        class Recorded(ReferenceKernel):
            name = "recorded"

            def mean_and_grad(self, logits, *_):
                return logits.mean(), logits[:, 0, 0], logits[:, 0, 0], logits

        assert "mean of mean_and_grad requires grad" in fastaug.check_kernel(Recorded()).worst

    def test_only_what_a_kernel_supports_is_asked_of_it(self) -> None:
        class Half(ReferenceKernel):
            name = "half"
            soft_targets = False

            def supports(self, logits: Tensor) -> str | None:
                return None if logits.dtype == torch.float16 else "fp16 alone"

            def value_and_grad(self, logits: Tensor, targets: Tensor | None, **settings: Any):
                assert logits.dtype == torch.float16
                return super().value_and_grad(logits, targets, **settings)

        report = fastaug.check_kernel(Half())
        assert report.admitted
        assert report.cases == 7

    def test_a_kernel_that_supports_nothing_is_not_admitted(self) -> None:
        report = fastaug.check_kernel(
            "triton" if not torch.cuda.is_available() else "native", "cpu"
        )
        assert report.admitted == (report.cases > 0)


class TestRemembered:
    @pytest.fixture
    def checks(self, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The names of kernels that were compared."""
        compared: list[str] = []
        compare = admission.compare

        def counting(kernel: Any, device: torch.device) -> Any:
            compared.append(kernel.name)
            return compare(kernel, device)

        monkeypatch.setattr(admission, "compare", counting)
        return compared

    def use(self, kernel: ReferenceKernel) -> None:
        registry._found.clear()
        fastaug.pairwise_kl(torch.zeros(1, 2, 3), kernel=kernel)

    def test_a_kernel_is_compared_once(self, checks: list[str]) -> None:
        self.use(Plain())
        self.use(Plain())
        assert checks == ["plain"]

    def test_one_that_does_not_name_its_sources_is_compared_each_time(
        self, checks: list[str]
    ) -> None:
        """Its base class and helpers may be in other files."""

        class Inherited(ReferenceKernel):
            name = "inherited"

        self.use(Inherited())
        self.use(Inherited())
        assert checks == ["inherited"] * 2

    def test_one_with_settings_of_its_own_is_compared_each_time(self, checks: list[str]) -> None:
        self.use(Changed(scaled()))
        with pytest.raises(KernelUnavailableError):
            self.use(Changed(scaled(values=2)))
        assert checks == ["changed"] * 2

    def test_another_source_is_compared_again(self, checks: list[str], tmp_path: Path) -> None:
        class Compiled(ReferenceKernel):
            name = "compiled"

            def sources(self) -> list[Path]:
                return [tmp_path / "kernel.cu"]

        for content in ("one", "one", "two"):
            (tmp_path / "kernel.cu").write_text(content)
            self.use(Compiled())
        assert checks == ["compiled"] * 2

    def test_a_refusal_is_kept_until_a_source_changes(
        self, checks: list[str], tmp_path: Path
    ) -> None:
        source = tmp_path / "kernel.cu"

        class Wrong(ReferenceKernel):
            name = "wrong"

            def sources(self) -> list[Path]:
                return [source]

            def value_and_grad(self, *args, **kwargs):
                nll, kl, grad = super().value_and_grad(*args, **kwargs)
                return nll, 2 * kl, grad

        messages = []
        for content in ("one", "one", "two"):
            source.write_text(content)
            with pytest.raises(KernelUnavailableError) as caught:
                self.use(Wrong())
            messages.append(str(caught.value))
        assert checks == ["wrong"] * 2
        assert ["fastaug.doctor" in message for message in messages] == [False, True, False]

    def test_a_check_on_request_replaces_a_refusal(
        self, checks: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As after a change of the machine that the cache does not know about."""
        with monkeypatch.context() as patch:
            patch.setattr(Plain, "value_and_grad", lambda *_, **__: (None, None, None))
            with pytest.raises(KernelUnavailableError):
                self.use(Plain())
        with pytest.raises(KernelUnavailableError):
            self.use(Plain())  # from the cache
        assert fastaug.check_kernel(Plain()).admitted
        self.use(Plain())
        assert checks == ["plain"] * 2

    def test_without_memory_nothing_is_cached(
        self, checks: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_memory(*_: object, **__: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(Plain, "value_and_grad", no_memory)
            with pytest.raises(KernelUnavailableError):
                self.use(Plain())
        self.use(Plain())
        assert checks == ["plain"] * 2

    def test_one_that_supports_nothing_is_not_refused_for_good(
        self, checks: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What it needs may be there in the next process."""
        with monkeypatch.context() as patch:
            patch.setattr(Plain, "supports", lambda *_: "needs a variable that is not set")
            assert not fastaug.check_kernel(Plain()).admitted
        self.use(Plain())
        assert checks == ["plain"] * 2

    def test_a_check_that_fails_later_takes_the_admission_back(
        self, checks: list[str], own_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.use(Plain())
        monkeypatch.setattr(Plain, "value_and_grad", lambda *_, **__: (None, None, None))
        assert not fastaug.check_kernel(Plain()).admitted
        with pytest.raises(KernelUnavailableError):
            self.use(Plain())
        (note,) = (own_cache / "kernels").glob("admission-*.json")
        assert not json.loads(note.read_text())["admitted"]

    def test_a_damaged_report_is_made_again(self, checks: list[str], own_cache: Path) -> None:
        self.use(Plain())
        (note,) = (own_cache / "kernels").glob("admission-*.json")
        assert json.loads(note.read_text())["admitted"]
        note.write_text(note.read_text()[:10])
        self.use(Plain())
        assert checks == ["plain"] * 2

    def test_a_kernel_without_a_source_is_compared_in_each_process(self, checks: list[str]) -> None:
        space: dict[str, Any] = {"ReferenceKernel": ReferenceKernel}
        exec("class Typed(ReferenceKernel):\n    name = 'typed'\n", space)
        space["Typed"].__module__ = "no_such_module"
        self.use(space["Typed"]())
        self.use(space["Typed"]())
        assert checks == ["typed"] * 2
