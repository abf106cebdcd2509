"""Python programs that train a sharded model, drawn from a seed.

`draw(seed)` returns a program as Python source: module classes, `build()`, which modules are units and how, and
`train(run)`, line by line. program_runs.py runs it.

    TESSERA_PROGRAM_SEED=17 python/tests/ranks.py python/tests/test_programs.py    shows program 17 and runs it
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

PARAMETERS = {
    "Linear": ("weight", "bias"),
    "Scale": ("weight",),
    "Norm": ("weight", "bias"),
    "Running": ("shift",),
    "Embed": ("weight",),
    "Head": ("weight",),
}


OPTIMIZERS = ("torch.sgd", "torch.sgd", "torch.adamw", "tessera.sgd", "tessera.adamw")


@dataclasses.dataclass
class Leaf:
    """One layer of a drawn module."""

    path: str
    kind: str
    dtype: str
    pinned: bool = False
    rounded: bool = False


@dataclasses.dataclass
class Node:
    """One drawn module class, of which the model has one object."""

    number: int
    path: str
    style: str  # how it is called: "tensor", "dict"
    fresh: bool  # its result belongs to this call alone
    lines: list[str] = dataclasses.field(default_factory=list)
    made: list[str] = dataclasses.field(default_factory=list)


class Draw:
    """Makes the source of one program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.nodes: list[Node] = []
        self.leaves: list[Leaf] = []
        self.drops: list[str] = []
        self.tied: set[str] = set()
        self.frozen: list[str] = []
        self.replicated: list[str] = []
        self.mode = self.random.choice(["F64", "F64", "F32", "F32", "mixed", "mixed", "policy", "policy"])
        self.compiles = self.mode in ("F64", "F32") and self.chance(0.04)
        self.fails = self.chance(0.05)
        self.is_of_tokens = self.chance(0.3)
        # What one rank recomputes and another one does not reach is refused by name.
        self.recomputes = self.chance(0.6)
        self.depth = self.random.randint(2, 5)
        self.budget = self.random.randint(2, 7)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def dtype(self) -> str:
        if self.mode == "mixed":
            return self.random.choice(["F32", "F32", "BF16", "F64"])
        if self.mode == "policy":
            return self.random.choice(["F32", "F32", "F32", "BF16"])
        return self.mode

    def source(self) -> str:
        """Returns the program."""
        self.node("", 1)
        classes = [self.text_of(node) for node in self.nodes]
        units = self.units()
        return "\n\n".join([*classes, self.build(units), self.sharding(units), self.training(units)]) + "\n"

    # Modules.

    def node(self, path: str, level: int) -> Node:
        is_root = level == 1
        node = Node(len(self.nodes), path, "tensor" if is_root or self.chance(0.7) else "dict", self.chance(0.6))
        self.nodes.append(node)
        prefix = f"{path}." if path else ""
        calls: list[tuple[str, bool]] = []  # an expression with {}, and whether its result belongs to this call alone
        for _ in range(self.random.randint(0 if is_root else 1, 2)):
            name = f"leaf{len(self.leaves)}"
            calls.append(self.leaf(node, prefix + name, name))
        children = self.random.randint(1 if is_root else 0, 3 if is_root else 2) if level < self.depth else 0
        many: list[str] = []
        for i in range(children):
            if self.budget == 0:
                break
            self.budget -= 1
            in_list = self.chance(0.3)
            name = f"many.{len(many)}" if in_list else f"child{i}"
            child = self.node(prefix + name, level + 1)
            made = f"Node{child.number}()"
            if in_list:
                many.append(made)
            else:
                node.made.append(f"self.child{i} = {made}")
            where = f"self.many[{len(many) - 1}]" if in_list else f"self.child{i}"
            if child.style == "dict":
                where += '({{"x": {}, "none": None, "text": "t"}}, also=[x.new_ones(())])["out"][0]'
            else:
                where += "({})"
            calls.append((where, child.fresh))
        if many:
            node.made.append(f"self.many = nn.ModuleList([{', '.join(many)}])")
        self.random.shuffle(calls)
        self.body(node, calls, is_root)
        return node

    def leaf(self, node: Node, path: str, name: str) -> tuple[str, bool]:
        kinds = ["Linear", "Linear", "Scale", "Norm"]
        if self.mode != "policy" and not self.fails and not self.compiles:
            kinds.append("Running")
        kind = self.random.choice(kinds)
        with_rules = self.mode == "policy"
        leaf = Leaf(path, kind, self.dtype(), with_rules and self.chance(0.25), with_rules and self.chance(0.15))
        self.leaves.append(leaf)
        node.made.append(f"self.{name} = {kind}({leaf.dtype})")
        return f"self.{name}({{}})", True

    def body(self, node: Node, calls: list[tuple[str, bool]], is_root: bool) -> None:
        say = node.lines.append
        if node.style == "dict":
            say('x = batch["x"] * also[0]')
        if is_root:
            self.leaves.append(Leaf("first", "Embed" if self.is_of_tokens else "Scale", self.dtype()))
            node.made.append(f"self.first = {self.leaves[-1].kind}({self.leaves[-1].dtype})")
            say("y = x = self.first(x)")
        else:
            say("y = x")
        while calls:
            call, fresh = calls.pop()
            of = call.format
            draw = self.random.random()
            if draw < 0.05:
                continue  # a module that nothing calls
            if draw < 0.3:
                say(f"y = y + {of('y')}")
            elif draw < 0.4 and fresh:
                say(f"y = {of('y')}")
                say("y += 1")
            elif draw < 0.45 and fresh:
                say(f"y = torch.relu_({of('y')})")
            elif draw < 0.55 and self.recomputes:
                say(f"y = checkpoint(lambda z: {of('z')}, y, use_reentrant=False)")
            elif draw < 0.62 and calls and self.recomputes:
                other, _ = calls.pop()
                both = other.format(call.format("z"))
                say(f"y = checkpoint(lambda z: {both}, y, use_reentrant=False)")
            elif draw < 0.68:
                say(f"y = {of(of('y'))}")
            elif draw < 0.78 and not self.recomputes:
                say(f"z = {of('y')}")
                say("y = y if self.drops else y + z")
                self.drops.append(node.path)
            else:
                say(f"y = {of('y')}")
            draw = self.random.random()
            if draw < 0.3:
                say("y = torch.tanh(y)")
            elif draw < 0.4:
                say("y = F.dropout(y, 0.25, self.training)")
        if is_root:
            last = Leaf("last", "Head" if self.is_of_tokens else "Linear", self.dtype())
            self.leaves.append(last)
            node.made.append(f"self.last = {last.kind}({last.dtype})")
            say("y = self.last(torch.tanh(y))")
            say(self.random.choice(["return y", "return (y, x)", 'return {"y": y, "more": [None, y * 2]}']))
            return
        say("y = y + 0.25 * x" if node.fresh else "y = torch.tanh(y)")
        say('return {"out": (y, None), "text": batch["text"]}' if node.style == "dict" else "return y")

    def text_of(self, node: Node) -> str:
        arguments = "batch, *, also" if node.style == "dict" else "x"
        lines = [f"class Node{node.number}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += ["        self.drops = self.fails = False"]
        lines += [f"        {made}" for made in node.made]
        lines += ["", f"    def forward(self, {arguments}):"]
        if self.fails:
            lines += ["        if self.fails:", '            raise ValueError("the user\'s")']
        return "\n".join([*lines, *(f"        {line}" for line in node.lines)])

    # Sharding.

    def units(self) -> list[str]:
        """Inner ones first, "" last."""
        chosen = [node.path for node in self.nodes[1:] if self.chance(0.6)]
        chosen += [leaf.path for leaf in self.leaves if self.chance(0.15)]
        return sorted(chosen, key=lambda path: -path.count(".")) + [""]

    def nearest(self, path: str, units: Sequence[str]) -> str:
        inside = [unit for unit in units if unit == "" or path == unit or path.startswith(unit + ".")]
        return max(inside, key=len)

    def build(self, units: Sequence[str]) -> str:
        lines = ["def build():", f"    torch.default_generator.manual_seed({self.seed})", "    model = Node0()"]
        for i, leaf in enumerate(self.leaves):
            for other in self.leaves[:i]:
                shapes = {"Embed": "table", "Head": "table"}
                same = shapes.get(leaf.kind, leaf.kind) == shapes.get(other.kind, other.kind)
                together = self.mode != "policy" or self.nearest(leaf.path, units) == self.nearest(other.path, units)
                if same and together and leaf.dtype == other.dtype and leaf.kind != "Running" and self.chance(0.25):
                    leaf.pinned = other.pinned = leaf.rounded = other.rounded = False
                    self.tied.update((f"{leaf.path}.weight", f"{other.path}.weight"))
                    lines.append(f"    model.{at(leaf.path)}.weight = model.{at(other.path)}.weight")
                    break
        for leaf in self.leaves:
            if leaf.path == "last" or not self.chance(0.15):
                continue
            name = self.random.choice(PARAMETERS[leaf.kind])
            if f"{leaf.path}.{name}" not in self.tied:
                self.frozen.append(f"{leaf.path}.{name}")
            lines.append(f"    model.{at(leaf.path)}.{name}.requires_grad_(False)")
        # What every result depends on is trained, whether or not it is tied.
        lines.append("    model.last.weight.requires_grad_(True)")
        return "\n".join([*lines, "    return model"])

    def sharding(self, units: Sequence[str]) -> str:
        lines = ["UNITS = {"]
        merges = self.mode != "policy" and self.chance(0.1)
        for unit in units:
            options: dict[str, str] = {}
            if self.chance(0.3):
                options["reshard_after_forward"] = str(self.chance(0.5))
            policy = self.policy(unit, units)
            if policy:
                options["mp_policy"] = f"MixedPrecisionPolicy({', '.join(policy)})"
            if merges and unit == "":
                options["merge_below_bytes"] = "1 << 20"
            lines.append(f"    {unit!r}: dict({', '.join(f'{key}={value}' for key, value in options.items())}),")
        lines.append("}")
        lines.append(f"MERGES = {merges}")
        lines.append(f"REPLICAS = {self.chance(0.15)}")
        names = [node.path for node in self.nodes[1:]] or [""]
        lines.append(f"COMPILED = {[self.random.choice(names)] if self.compiles else []!r}")
        return "\n".join(lines)

    def policy(self, unit: str, units: Sequence[str]) -> list[str]:
        """Returns the fields of a unit's policy; [] for none."""
        fields: list[str] = []
        rules: list[str] = []
        prefix = len(unit) + 1 if unit else 0
        frozen = [name[prefix:] for name in self.frozen if self.nearest(name.rpartition(".")[0], units) == unit]
        if frozen and self.chance(0.5):
            self.replicated += [name for name in self.frozen if self.nearest(name.rpartition(".")[0], units) == unit]
            rules.append(f"Rule({frozen!r}, frozen='replicate')")
        if self.mode == "policy" and not self.chance(0.15):
            fields.append("param_dtype=BF16")
            own = [leaf for leaf in self.leaves if self.nearest(leaf.path, units) == unit]
            for wish, says in (("pinned", "pin=True"), ("rounded", "grad_dtype=BF16")):
                names: list[str] = []
                for leaf in own:
                    if getattr(leaf, wish):
                        names += [leaf.path[prefix:]] if leaf.path != unit else PARAMETERS[leaf.kind]
                if names:
                    rules.append(f"Rule({names!r}, {says})")
            if self.chance(0.2):
                fields.append("reduce_dtype=BF16")
            if self.chance(0.2):
                fields.append("cast_forward_inputs=False")
            if self.chance(0.2):
                fields.append("output_dtype=F32")
        return [*fields, f"rules=[{', '.join(rules)}]"] if rules else fields

    # Training.

    def training(self, units: Sequence[str]) -> str:
        lines = ["def train(run):"]
        results = 0
        unit = lambda: self.random.choice(units)
        for step in range(self.random.randint(1, 3)):
            lines += self.controls(unit)
            micro_batches = self.random.choice([1, 1, 2, 3])
            for micro in range(micro_batches):
                is_last = micro == micro_batches - 1
                if micro_batches > 1:
                    lines.append(f"run.sync({'' !r}, {is_last or self.chance(0.4)})")
                    if not is_last and self.chance(0.2):
                        lines.append(f"run.sync({unit()!r}, False, recurse=False)")
                elif step > 0 or self.chance(0.2):
                    lines.append("run.sync('', True)")
                if self.drops and self.chance(0.5):
                    lines.append(f"run.drop({self.random.choice(self.drops)!r}, rank={self.random.randint(0, 1)})")
                made = []
                for _ in range(self.random.choice([1, 1, 1, 2])):
                    made.append(results)
                    needs = f", input_grad={not self.is_of_tokens and self.chance(0.3)}"
                    lines.append(f"run.forward({results}, seed={100 * self.seed + results}{needs})")
                    results += 1
                if len(made) > 1 and self.chance(0.25):
                    lines.append(f"run.forget({made.pop(self.random.randrange(2))})")
                if self.chance(0.15):
                    lines.append(f"run.evaluate(seed={100 * self.seed + 90 + step})")
                if len(made) > 1 and self.chance(0.5):
                    lines += [f"run.backward({one})" for one in self.random.sample(made, 2)]
                elif len(made) == 1 and not self.compiles and self.chance(0.1):
                    lines += [f"run.backward({made[0]}, retain=True)", f"run.backward({made[0]})"]
                else:
                    lines.append(f"run.backward({', '.join(map(str, made))})")
                lines.append("run.drop(None)")
                if self.chance(0.3):
                    lines.append("run.check_if_reduced()")
            lines.append("run.check()")
            if self.chance(0.3):
                lines.append("run.clip(0.5)")
            lines += [f"run.step({self.random.choice(OPTIMIZERS)!r})", "run.zero_grad()"]
            changeable = [f"{leaf.path}.{name}" for leaf in self.leaves[:-1] for name in PARAMETERS[leaf.kind]]
            changeable = [name for name in changeable if name not in self.tied and name not in self.replicated]
            if changeable and self.chance(0.15):
                lines.append(f"run.trainable({self.random.choice(changeable)!r}, {self.chance(0.5)})")
            if self.fails and self.chance(0.6):
                rank = self.random.choice([None, 0, 1])
                path = self.random.choice([node.path for node in self.nodes])
                lines.append(f"run.fail({path!r}, rank={rank}, seed={100 * self.seed + 80 + step})")
        lines.append("run.end()")
        return "\n    ".join(lines)

    def controls(self, unit: Callable[[], str]) -> list[str]:
        choices = [
            lambda: f"run.reshard_after_forward({unit()!r}, {self.chance(0.5)}, {self.chance(0.5)})",
            lambda: f"run.reshard_after_backward({unit()!r}, {self.chance(0.5)}, {self.chance(0.5)})",
            lambda: f"run.forward_prefetch({unit()!r}, {[unit(), unit()]!r})",
            lambda: f"run.backward_prefetch({unit()!r}, {[unit()]!r})",
            lambda: f"run.divide({self.random.choice([1.0, 2.0, 3.0, 0.5])})",
            lambda: f"run.unshard({unit()!r}, {self.chance(0.5)})",
            lambda: f"run.reshard({unit()!r})",
            lambda: f"run.evaluate(seed={100 * self.seed + 99})",
        ]
        return [self.random.choice(choices)() for _ in range(self.random.choice([0, 0, 1, 2]))]


def at(path: str) -> str:
    """Returns a path of modules as an expression: "many.0.leaf" is many[0].leaf."""
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))[1:]


def draw(seed: int) -> str:
    """Returns the source of program `seed`."""
    return Draw(seed).source()
