"""Plant one bug after the other in a copy of the package and see that the tests catch it.

``make mutants`` plants all of them, ``make mutants ARGS=snapkv`` those whose file or reason contains a word.
A bug that survives is a missing test; one that no longer applies is a stale entry.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
LAWS, CONVENTIONS, POLICIES = "tests/test_mechanisms.py", "tests/test_conventions.py", "tests/test_policies.py"
SWITCH, LAYER, ENGINES, COMPARE = (
    "tests/hf/test_switch.py",
    "tests/test_layer.py",
    "tests/test_engines.py",
    "tests/compare/test_pieces.py",
)


@dataclasses.dataclass(frozen=True)
class Bug:
    """One planted bug.

    Args:
        file: path below ``src/foveal``.
        before: text that stands there exactly once.
        after: what replaces it.
        why: what is wrong then.
        tests: arguments of pytest that select the tests which must notice.
    """

    file: str
    before: str
    after: str
    why: str
    tests: str

    def plant(self, package: pathlib.Path) -> None:
        """Change the file below a copy of the package.

        Raises:
            ValueError: if the entry is stale.
        """
        path = package / self.file
        source = path.read_text()
        if source.count(self.before) != 1:
            raise ValueError(f"{self.file}: {self.before!r} stands there {source.count(self.before)} times, not once")
        path.write_text(source.replace(self.before, self.after))


def laws(words: str) -> str:
    """The laws of some mechanisms."""
    return f'{LAWS} -k "{words}"'


RECURRENT = laws("delta_rule or linear")
RECURRENCE, SOFTMAX, BLOCKS = (f"engines/{name}/eager.py" for name in ("recurrence", "softmax", "block_sparse"))
PROGRAM, NATIVE = "engines/recurrence/program.py", "engines/recurrence/native.py"
KERNEL, SIMD = "native/recurrence.hpp", "native/simd.hpp"
KERNELS = "tests/test_native.py"

BUGS = [
    # the recurrence engine
    Bug(RECURRENCE, "decay.pairs(w, write, strict=True) @ value", "decay.pairs(w, write, strict=False) @ value",
        "a token erases its own write", RECURRENT),
    Bug(RECURRENCE, "state = grown + (state if totals is None else totals[n] * state)", "state = grown + state",
        "the state is not decayed across chunks", RECURRENT),
    Bug(PROGRAM, "still = terms.map(lambda x: x.where(real, 0) if x.shape[2] == real.shape[2] else x)",
        "still = dataclasses.replace(terms, write=terms.write.where(real, 0))",
        "hidden tokens still age the state", laws("retention")),
    Bug(RECURRENCE, "state = decay[t][..., None] * state", "state = 1.0 * state",
        "a decode step forgets to decay", RECURRENT),
    Bug(RECURRENCE, "keep = -(last_erased @ from_state)", "keep = last_erased @ from_state",
        "erasure adds across chunks", RECURRENT),
    Bug(RECURRENCE, "x * (self.sums[..., -1:, :] - self.sums)", "x * (self.sums[..., -1:, :] - self.sums[..., :1, :])",
        "every token of a chunk decays as much as its first", RECURRENT),
    Bug(RECURRENCE, "anchor = self.sums[..., start - 1 : start, :]", "anchor = self.sums[..., :1, :]",
        "a positive exponent overflows under strong decay", f"{CONVENTIONS} tests/test_bug_reports.py"),
    Bug(RECURRENCE, "log_decay.double().cumsum(-2)", "log_decay.cumsum(-2)",
        "decay sums lose their digits in fp32", f"{CONVENTIONS} tests/test_bug_reports.py"),
    Bug(RECURRENCE, "log_decay=terms.log_decay.clamp(min=FLOOR)", "log_decay=terms.log_decay",
        "a gate of 0 gives NaN", f"{CONVENTIONS} tests/test_bug_reports.py"),
    Bug(PROGRAM, "nothing = denominator == 0", "nothing = denominator != denominator",
        "dividing by an empty normaliser", laws("linear")),
    Bug(PROGRAM, "RecurrentState(last[..., :-1], last[..., -1])",
        "RecurrentState(last[..., :-1], torch.zeros_like(last[..., -1]))",
        "the normaliser is lost between calls", laws("linear")),
    Bug(PROGRAM, "x.repeat_interleave(call.group, 1)", "x.repeat(1, call.group, 1, 1)",
        "grouped heads in the wrong order", RECURRENT),
    Bug(PROGRAM, "read=terms.read * scale", "read=terms.read", "the scale is forgotten", RECURRENT),
    # the compiled kernels
    Bug(KERNEL, "until[t] = log_until;\n                log_until += step[t];", "log_until += step[t];\n                until[t] = log_until;",
        "a token's write is aged by its own decay", KERNELS),
    Bug(KERNEL, "gain = gain * load(d.over + I * Kp + k);", "gain = gain * load(d.over + k);",
        "blocks of a chunk age by the first block's decay", KERNELS),
    Bug(KERNEL, "if (strict[m]) row[t] = 0;", "", "a token erases its own write, per channel", KERNELS),
    Bug(KERNEL, "for (long s = strict[m] ? t : t + 1; s < CHUNK; s++) row[s] = 0;", "for (long s = t + 1; s < CHUNK; s++) row[s] = 0;",
        "a token erases its own write", KERNELS),
    Bug(KERNEL, "if (i) product<Into::Add>(N, width, i, {lower + i * CHUNK, CHUNK, 1}, y, width, y + i * width, width);", "",
        "the triangular system is solved in pieces of 8 rows only", KERNELS),
    Bug(KERNEL, "if (after < rows)", "if (after < rows - N)", "the transposed system forgets its last rows", KERNELS),
    Bug(KERNEL, "at.rows = round_up(at.real, BLOCK);", "at.rows = round_up(at.real, LANES);",
        "a last block that is not whole", KERNELS),
    Bug(KERNEL, "if (z.normalize && normalizer) state[k * z.Vp + z.V] = normalizer[head * z.K + k];", "",
        "the normaliser starts from nothing", KERNELS),
    Bug(KERNEL, "g[z.V] = -dot * inverse;", "g[z.V] = 0;", "no gradient through the normaliser", KERNELS),
    Bug(KERNEL, "for (long s = m ? t : t + 1; s < CHUNK; s++) row[s] = 0;  // L is strict", "for (long s = t + 1; s < CHUNK; s++) row[s] = 0;",
        "a token erases itself in the gradient", KERNELS),
    Bug(KERNEL, "store(sums + s, load(sums + s) - both);", "", "a decay's gradient counts pairs that it does not part", KERNELS),
    Bug(KERNEL, "before += prefix[t * W + k];", "", "what was written knows no gradient of later decays", KERNELS),
    Bug(KERNEL, "collect(sums, y.raw, near, -1.0f, n, z);", "", "the same, per channel and inside a chunk", KERNELS),
    Bug(KERNEL, "scale_channels(anchored, d.over + (I - 1) * Kp, 0, start - BLOCK, Kp);", "",
        "gradients of early blocks are not aged", KERNELS),
    Bug(KERNEL, "put_scaled(x.grad_read, at, z, grad_r, z.scale);", "put_scaled(x.grad_read, at, z, grad_r, 1.0f);",
        "the gradient forgets the scale", KERNELS),
    Bug(KERNEL, "if (x.grad_state) write_state(grad_state, head, z, x.grad_state, x.grad_normalizer);",
        "if (x.grad_state) write_state(f.state, head, z, x.grad_state, x.grad_normalizer);",
        "a wrong gradient of the initial state", KERNELS),
    Bug(KERNEL, "for (long k = 0; k < K; k++) w[k] *= d[k];", "", "a decode step erases from the undecayed state", KERNELS),
    Bug(KERNEL, "for (; j < V; j++) column(", "for (; j < V - 1; j++) column(", "a decode step forgets the last column", KERNELS),
    Bug(SIMD, "return x > low ? (Vec)bits : (Vec){};", "return (Vec)bits;", "a decay of -1e4 leaves a trace", KERNELS),
    Bug(SIMD, "bits + 0x7fff + (bits >> 16 & 1)", "bits", "bf16 is cut off, not rounded", KERNELS),
    Bug(SIMD, "for (long i = 0; i < n; i++) out[i] = x[i * s] * factor;", "for (long i = 0; i < n; i++) out[i] = x[i] * factor;",
        "a stride of the last axis is ignored", KERNELS),
    Bug(NATIVE, "None if u is write else u", "None", "another vector is erased than was asked for", KERNELS),
    Bug(NATIVE, "if torch.is_grad_enabled():\n        raise", "if False:\n        raise", "a second derivative is silently wrong", KERNELS),
    # the softmax engine
    Bug(SOFTMAX, "peak = peak.masked_fill(peak == -torch.inf, 0.0)", "peak = peak + 0.0",
        "a row that sees nothing becomes NaN", laws("softmax")),
    Bug(SOFTMAX, "int((k < first - before).sum(-1).min())", "int((k < first - before).sum(-1).max())",
        "a tile leaves out keys that a padded row still sees", laws("sliding_window")),
    Bug(SOFTMAX, "int((k <= last + after).sum(-1).max())", "int((k < last + after).sum(-1).max())",
        "the last query of a tile does not see itself", laws("sliding_window or softmax")),
    Bug(SOFTMAX, "    return call.replace(k=call.k.where(seen, 0), v=call.v.where(seen, 0))", "    return call",
        "NaN leaks from behind a mask", f"{laws('softmax')} {CONVENTIONS} tests/test_bug_reports.py"),
    Bug(SOFTMAX, "(T == 1 and not call.top_left)", "T == 1",
        "a single query aligned at the top sees every key", "tests/test_breakage.py"),
    Bug(SOFTMAX, "share = (lse - sink).masked_fill(empty, -torch.inf)", "share = (sink - lse).masked_fill(empty, -torch.inf)",
        "a sink takes the others' share", laws("softmax")),
    Bug(SOFTMAX, "torch.where(empty, sink, torch.logaddexp(lse.masked_fill(empty, 0.0), sink))", "lse + 0 * sink",
        "the log-sum-exp leaves out the sink", ENGINES),
    Bug(SOFTMAX, "recent = count > count[:, -1:] - before", "recent = count > count[:, -1:] - before + 1",
        "the state of a window is one token short", laws("sliding_window")),
    Bug(SOFTMAX, "visible = (at.k <= at.q) | (not call.causal)", "visible = (at.k < at.q) | (not call.causal)",
        "a query does not see itself", laws("softmax")),
    Bug(SOFTMAX, "triangle = everything and call.causal and T == S", "triangle = everything and call.causal",
        "fewer queries than keys are aligned top-left", ENGINES),
    # the block-sparse engine
    Bug(BLOCKS, "slot = order.gather(1, slot.expand(len(order), -1, -1).flatten(1)).view(-1, *position.shape)", "pass",
        "padding is not squeezed out of the blocks", laws("moba or sparse_transformer")),
    Bug(BLOCKS, "        visible = visible & (here.k <= here.q)", "        pass",
        "the future inside a block is seen", laws("moba")),
    Bug(BLOCKS, "weight = (lse - peak[query]).exp()", "weight = torch.ones_like(lse)",
        "partial softmaxes are averaged without their weights", laws("moba")),
    Bug(BLOCKS, "T if rows == ROWS else rows", "rows", "a block with many readers is dropped", ENGINES),
    Bug(BLOCKS, "g, t = h // call.group, query", "g, t = h % call.k.shape[1], query",
        "query heads read the wrong key head", laws("moba")),
    # calls, packing, states, checks, the layer
    Bug("call.py", "torch.where(count == 0, slot - first, count - 1)", "slot.expand_as(count)",
        "padding takes room in windows", laws("sliding_window or moba")),
    Bug("packing.py", "padding = padding & _gather(call.padding, bucket.keys, 1)", "pass",
        "packing ignores the mask", ENGINES),
    Bug("packing.py", "back = torch.cat(order).argsort()", "back = torch.cat(order)",
        "packed sequences come back in another order", ENGINES),
    Bug("packing.py", "_join(states, torch.cat(members).argsort())", "_join(states, torch.cat(members))",
        "packed states come back in another order", f"{laws('packed_equals_separate')} {CONVENTIONS}"),
    Bug("packing.py", "state=None if call.state is None else call.state.index_select(bucket.sequences)", "state=call.state",
        "packed sequences start from each other's states", f"{laws('packed_equals_separate')} {CONVENTIONS}"),
    Bug("state.py", "torch.cat([front(state.real(), 1) for state in states])", "torch.cat([front(state.real(), 1) | True for state in states])",
        "the padding of joined states becomes tokens", f"{laws('packed_equals_separate')} {CONVENTIONS}"),
    Bug("state.py", "torch.argsort(wanted.to(torch.int8), dim=1, stable=True)",
        "torch.argsort(wanted.to(torch.int8), dim=1, stable=True).flip(1).flip(0)",
        "a trimmed state keeps the wrong tokens", laws("sliding_window")),
    Bug("checks.py", "if sizes.setdefault(axis, size) != size:", "if sizes.setdefault(axis, size) < 0:",
        "shapes are not compared", laws("bad_input_is_named")),
    Bug("checks.py", "if least < low or most > high:", "if least < low:",
        "gates above their range pass", laws("bad_input_is_named")),
    Bug("checks.py", "if mask.dtype != torch.bool and mask.dtype not in FLOATS:", "if mask.dtype == torch.complex64:",
        "integer masks are taken", CONVENTIONS),
    Bug("checks.py", "return 1.0 / math.sqrt(key_width)", "return 1.0 / key_width", "the scale is 1 / K", laws("softmax")),
    Bug("api.py", "asks = padding[:, S - T :]", "asks = padding[:, :T]",
        "a query's padding is read at the wrong end", f"{laws('softmax or moba')} {CONVENTIONS}"),
    Bug("layer.py", "return count - first.gather(1, segment) + start[:, None]", "return count + start[:, None]",
        "positions run on into the next packed sequence", LAYER),
    Bug("layer.py", "y = (taken * fits[..., None] * weight).sum(2)", "y = (taken * weight).sum(2)",
        "the convolution mixes packed sequences", LAYER),
    Bug("layer.py", "LayerState(result.state, tail, start + real.sum(1))", "LayerState(result.state, tail, start)",
        "rotary positions start again at every call", LAYER),
    # mechanisms
    Bug("mechanisms/recurrent/delta_rule.py", "erase=(write, k)", "erase=(k, k)",
        "the erasure ignores the writing strength", laws("delta_rule")),
    Bug("mechanisms/recurrent/delta_rule.py", "q, k = normalize(q, dim=-1), normalize(k, dim=-1)", "k = normalize(k, dim=-1)",
        "queries are not normalised", laws("delta_rule")),
    Bug("mechanisms/recurrent/gated_delta_rule.py", 'Cost(train="T * (K * V', 'Cost(train="T**2 * (K * V',
        "a wrong complexity is claimed", laws("gated_delta_rule")),
    Bug("mechanisms/recurrent/gated_delta_rule.py", "normalize_qk: divide", "qk: divide",
        "a setting is undocumented", laws("gated_delta_rule")),
    Bug("mechanisms/recurrent/retention.py", "torch.log1p(-(2.0 ** (-self.slowest - head)))",
        "torch.log1p(-(2.0 ** (-self.slowest - head - 1)))", "every head forgets at its neighbour's rate", laws("retention")),
    Bug("mechanisms/recurrent/mamba2.py", "return Terms(q, dt[..., None] * k, v", "return Terms(q, k, v",
        "the step size does not reach what is written", laws("mamba2")),
    Bug("mechanisms/linear/linear.py", '"elu": lambda x: elu(x) + 1,', '"elu": lambda x: elu(x) + 1.01,',
        "features are shifted", laws("linear")),
    Bug("mechanisms/sparse/moba.py", "masked_fill(number >= own, -torch.inf)", "masked_fill(number > own, -torch.inf)",
        "the own block uses up a choice", laws("moba")),
    Bug("mechanisms/sparse/moba.py", "return past | (number == own)", "return past", "the own block is left out", laws("moba")),
    Bug("mechanisms/sparse/sparse_transformer.py", "second & ~first)", "second)",
        "a key that stands in two layouts counts twice", laws("sparse_transformer")),
    Bug("mechanisms/sparse/sparse_transformer.py", "first, second = gap <= l, gap", "first, second = gap < l, gap",
        "the neighbourhood is one key short", laws("sparse_transformer")),
    Bug("mechanisms/classic/softmax.py", "slope * (at.q - at.k).abs()", "slope * (at.q - at.k)",
        "ALiBi rewards the future", laws("softmax")),
    Bug("mechanisms/classic/softmax.py", "alibi_slopes(2 * lower)[0::2]", "alibi_slopes(2 * lower)[1::2]",
        "ALiBi takes the wrong slopes for three heads", f"{CONVENTIONS} tests/test_bug_reports.py tests/test_oracles.py"),
    Bug("mechanisms/classic/softmax.py", "(self.window - 1, self.window - 1)", "(self.window, self.window)",
        "a window keeps one key too many", CONVENTIONS),
    # policies and their engine
    Bug("engines/cache/__init__.py", "rank = rank.masked_fill(~real[:, None], -torch.inf)\n", "rank = rank + 0\n",
        "padding survives in favour of tokens", f"{POLICIES} {SWITCH}"),
    Bug("engines/cache/__init__.py", "index = best.masked_fill(~chosen[:, None], -1).sort(-1).values",
        "index = best.masked_fill(~chosen[:, None], -1)", "survivors are out of order", f"{POLICIES} {SWITCH}"),
    Bug("engines/cache/__init__.py", "seen = (slot <= own[:, None]) & real", "seen = (slot < own[:, None]) & real",
        "an observing query does not see itself", POLICIES),
    Bug("engines/cache/__init__.py", "(order > order[:, -1:] - last) & real", "(order >= order[:, -1:] - last) & real",
        "one token too many is protected", f"{POLICIES} {SWITCH}"),
    Bug("policies/eviction/snapkv.py", "weight.sum((2, 3)) / (weight.shape[2] * W)", "weight.amax((2, 3))",
        "the largest attention instead of the mean", f"{POLICIES} -k snapkv"),
    Bug("policies/eviction/snapkv.py", "paid[..., k.shape[2] - W :] = 0", "pass",
        "observing queries pool into their neighbours", f"{POLICIES} -k snapkv"),
    Bug("policies/eviction/knorm.py", "return -norm", "return norm", "the largest keys are kept", f"{POLICIES} -k knorm"),
    Bug("policies/eviction/h2o.py", "device=k.device) if past is None else past", "device=k.device)",
        "sums start again at every call", f"{POLICIES} {SWITCH}"),
    Bug("policies/eviction/tova.py", "weight.mean((1, 2, 3))", "weight.amax((1, 2, 3))",
        "the largest attention instead of the mean", f"{POLICIES} -k tova"),
    Bug("policies/eviction/streaming_llm.py", "return self.sinks, 1", "return 0, 1",
        "the sinks are evicted", f"{POLICIES} {SWITCH}"),
    Bug("policies/retrieval/quest.py", "grouped.clamp(max=0) @ low.mT", "grouped.clamp(max=0) @ high.mT",
        "the bound is none for negative queries", f"{POLICIES} -k quest"),
    Bug("policies/retrieval/quest.py", "newest.clamp(min=0), torch.inf)", "newest.clamp(min=0), -torch.inf)",
        "the newest page is not read", f"{POLICIES} -k quest"),
    # pretrained models
    Bug("hf/switch.py", "config._attn_implementation_internal = before[key]", "config._attn_implementation_internal = name",
        "the model is not restored", SWITCH),
    Bug("hf/cache.py", "(queries.shape[2] == 1 and not policy.while_decoding)", "(queries.shape[2] == 1)",
        "nothing is evicted while decoding", SWITCH),
    Bug("hf/cache.py", "self._each(lambda x: x[indices])", "self._each(lambda x: x)",
        "beams are not reordered", SWITCH),
    Bug("hf/cache.py", "        return self.seen\n", "        return self.keys.shape[2] if self.is_initialized else 0\n",
        "positions start again after an eviction", SWITCH),
    Bug("hf/cache.py", "x.untyped_storage().nbytes() for x in tensors", "x.numel() * x.element_size() for x in tensors",
        "memory is counted by shape, not by storage", "tests/hf/test_cache.py"),
    Bug("hf/cache.py", "gap = (self.real.sum(1) - limit)", "gap = (self.real.sum(1) - limit + 1)",
        "sinks are moved one position too far", SWITCH),
    Bug("hf/models.py", "moved = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)",
        "moved = torch.cat((a * cos + b * sin, b * cos - a * sin), -1)", "keys are rotated backwards", SWITCH),
    # the comparison
    Bug("compare/measure.py", "p, q = (x.double().log_softmax(-1) for x in (reference, other))",
        "q, p = (x.double().log_softmax(-1) for x in (reference, other))", "the divergence points the other way", COMPARE),
    Bug("compare/results.py", "for t in reversed(quartiles(times)))", "for t in quartiles(times))",
        "quartiles of a rate are swapped", COMPARE),
    Bug("compare/results.py", "if depth is None or where == depth", "if depth is None or where <= depth",
        "recall at a depth counts the facts before it", COMPARE),
    Bug("compare/results.py", "middle = p + z * z / (2 * n)", "middle = p", "the interval is not Wilson's", COMPARE),
    Bug("compare/runner.py", "return [first, *others[shift:], *others[:shift]]", "return [first, *others]",
        "the same method is always measured last", COMPARE),
]  # fmt: skip


def compile_kernels(folder: pathlib.Path) -> None:
    """Build the kernels of one instruction set beside their sources, where they are looked for first."""
    v3 = platform.machine() in ("x86_64", "AMD64")
    isa, lanes, march = ("v3", 8, ["-march=x86-64-v3"]) if v3 else ("base", 4, [])
    flags = [
        "-std=c++17",
        "-O1",
        "-ffp-contract=fast",
        "-fPIC",
        "-shared",
        "-fno-exceptions",
        "-fno-rtti",
        "-w",
        *march,
    ]
    names = [f"-DISA={isa}", f"-DLANES={lanes}", f"-DFOVEAL_ISAS(X)=X({isa})"]
    sources = [str(folder / name) for name in ("kernels.cpp", "attention.cpp", "dispatch.cpp")]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, *names, *sources, "-o", str(folder / "libfoveal.so")], check=True)


# An editable installation imports the original, whatever PYTHONPATH says, unless its hook is taken away.
UNHOOK = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
import foveal
assert foveal.__file__.startswith(__file__.removesuffix("sitecustomize.py")), foveal.__file__
"""


def run(bug: Bug | None, tests: str) -> tuple[str, str]:
    """Verdict and the first failing test of one bug (None: an untouched copy) in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="foveal-mutant-") as folder:
        copy = pathlib.Path(folder)
        for name in ("src", "tests", "pyproject.toml"):
            source = ROOT / name
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, copy / name, ignore=ignored) if source.is_dir() else shutil.copy(source, copy)
        (copy / "src" / "sitecustomize.py").write_text(UNHOOK)
        if bug is not None:
            bug.plant(copy / "src" / "foveal")
            if bug.file.startswith("native/"):
                compile_kernels(copy / "src" / "foveal" / "native")
        environment = os.environ | {
            "PYTHONPATH": str(copy / "src"),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', tests)]
        command = [sys.executable, "-m", "pytest", "-x", "-m", "not model", "-p", "no:cacheprovider", *words]
        result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    verdict = {0: "SURVIVED", 1: "caught"}.get(result.returncode, "BROKEN")
    return verdict, failed[1] if failed else result.stdout[-300:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="only bugs whose file or reason contains this")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    chosen = [bug for bug in BUGS if args.word in f"{bug.file} {bug.why}"]
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        every = " ".join(sorted({file for bug in chosen for file in re.findall(r"tests/\S+\.py", bug.tests)}))
        healthy = pool.submit(run, None, every)
        verdicts = []
        for bug, (verdict, test) in zip(chosen, pool.map(run, chosen, [bug.tests for bug in chosen]), strict=True):
            print(f"{verdict:8}  {bug.file}: {bug.why}  <- {test}", flush=True)
            verdicts.append(verdict)
    caught = verdicts.count("caught")
    print(f"{caught} of {len(chosen)} planted bugs are caught; the untouched copy {healthy.result()[0].lower()}")
    return int(caught < len(chosen) or healthy.result()[0] != "SURVIVED")


if __name__ == "__main__":
    sys.exit(main())
