"""Refuse entries of a layout that would have no effect: they mean something else than they state."""

from collections.abc import Callable

from tracestore.errors import UsageError
from tracestore.ingest.layout.addresses import AttributeStep, ItemsStep
from tracestore.ingest.layout.fields import FIELDS, KEY, LABELS, MASKS, SETTINGS_OF, STATES
from tracestore.ingest.layout.patterns import AXIS_NAMES
from tracestore.ingest.layout.places import RECORDS, Place, Plan, given_name


def check_effects(plan: Plan) -> None:
    """Raise UsageError for a setting or a line that nothing uses, and for a name that joins nothing."""
    for name in (*plan.layout.settings, *plan.layout.addresses):
        head, _, tail = name.partition(".")
        needs, has_effect = _NEEDS.get(head if head in SETTINGS_OF else name, ("", None))
        if has_effect is not None and not has_effect(plan, tail):
            raise UsageError(f"{name}: has no effect without {needs}; remove it")
    if plan.layout.addresses.keys() >= {*MASKS}:
        raise UsageError(f"{MASKS[1]}: stated in addition to {MASKS[0]}, its complement; remove one")
    _check_ignored(plan)
    _check_numbers_kept(plan)
    _check_made_values(plan)
    for place in plan.others:
        is_key = place.name.startswith(KEY)
        given = given_name(place)
        if is_key and given not in plan.kept_names and not any(given in plan.keys[other] for other in plan.others):
            raise UsageError(f"{place.name}: has no effect without a line that joins by it; remove it")
    if plan.names:
        for place in plan.others:
            if place.name != RECORDS and not place.is_optional:
                _check_names(plan, place)


def _check_ignored(plan: Plan) -> None:
    for entry in plan.left_out:
        # A line reads no attributes of its values, unless it names them.
        is_attribute = isinstance(entry.path[-1], AttributeStep) if entry.path else False
        above = {entry.path[:k] for k in range(len(entry.path) if is_attribute else 0, len(entry.path) + 1)}
        for place in plan.places:
            if place.name != RECORDS and place.address.files == entry.files and place.address.path in above:
                raise UsageError(f"ignore: {entry}: has no effect on the line for {place.name}, which reads all of it")


def _check_numbers_kept(plan: Plan) -> None:
    """Refuse numbers of rows next to items that are left out: it is open whether these count."""
    steps = [step for place in plan.others for step in place.address.path if isinstance(step, ItemsStep)]
    is_numbered = any(v.name == "N" or (v.path == ("#",) and v.name != "sample") for step in steps for v in step.values)
    for entry in plan.left_out if is_numbered else ():
        if entry.path and (number := getattr(entry.path[-1], "literal", None)) and number.isdecimal():
            raise UsageError(
                f"ignore: {entry}: leaves out an item, and a line joins by the numbers of items; remove one"
            )


def _check_made_values(plan: Plan) -> None:
    of_fields = {"id", "sample", *(place.name.removeprefix(KEY) for place in plan.others)}
    for name, pattern in plan.layout.templates.items():
        # A value in front of those of an address is made last.
        known = {*plan.names, "file"} | (of_fields if name in plan.layout.addresses else set())
        if unknown := next((one for one in pattern.names if one not in known), None):
            states = ", ".join(sorted(plan.names)) or "no name"
            raise UsageError(f"{name}: ={pattern.text}: nothing binds {unknown}: {plan.layout.states} binds {states}")


def _check_names(plan: Plan, place: Place) -> None:
    joined = {name.rstrip("*") for name in plan.keys[place]}
    if unused := sorted(place.trace_names - joined - plan.kept_names):
        states = ", ".join(sorted(plan.names))
        raise UsageError(
            f"{place.name}: {place.address}: {', '.join(unused)} joins nothing: {plan.layout.states} binds {states}"
            + (_line_for_id(place) if "id" in unused else "; remove it, or write * in a name")
        )


def _line_for_id(place: Place) -> str:
    """Return the line that takes the id from the rows of a place, as advice."""
    for prefix, step in place.steps():
        values = step.values if isinstance(step, ItemsStep) else ()
        source = next(("/".join(v.path) for v in values if v.name == "id"), None)
        others = ", ".join(f"{v.name}={'/'.join(v.path)}" for v in values if v.name in place.trace_names - {"id"})
        if source is not None:
            return f'; question_id = "{prefix}[{others}]/{source}" gives the id'
    return "; a line for question_id gives the id"


def _states(plan: Plan, names: str) -> bool:
    """Return whether the states have one of the axes, or a name of it."""
    bound = {AXIS_NAMES.get(name, name) for place in plan.states for name in place.address.bound}
    return bool((bound | {letter for place in plan.states for axis in place.axes for letter in axis}) & set(names))


def _has(plan: Plan, *names: str) -> bool:
    return any(place.name in names for place in plan.others)


def _gives(plan: Plan, *names: str) -> bool:
    return not plan.layout.templates.keys().isdisjoint(names) or _has(plan, *names)


# Those of rows; S.lengths are those of padded rows, too.
_RANGES = ("S.offsets", "S.starts", "S.ends", "S.owner")
# What settings and lines need, in words and as a condition of the plan and of the name behind their dot.
_NEEDS: dict[str, tuple[str, Callable[[Plan, str], bool] | None]] = {
    **{
        name: ("hidden_states, which have tokens", lambda plan, _: plan.layout.states == "hidden_states")
        for name, rule in FIELDS.items()
        if "S" in rule.axes or name == "S.lengths"
    },
    **dict.fromkeys(_RANGES, ("states behind each other, -> (N S)", lambda plan, _: _is_flat(plan))),
    **dict.fromkeys(
        (f"shape.{name}" for name in STATES), ("a line for the field", lambda plan, name: name == plan.layout.states)
    ),
    **dict.fromkeys(("P.rows", "P.repeats", "P.new"), ("passes of the states", lambda plan, _: _states(plan, "P"))),
    **dict.fromkeys(
        ("scale", "dtype"), ("a line for the field", lambda plan, name: name == plan.layout.states or _has(plan, name))
    ),
    "S.side": (
        "S.lengths of rows that are padded, or a number of S.padding where it is left",
        lambda plan, _: not _is_flat(plan) and (_has(plan, "S.lengths") or _is_left_of_ids(plan)),
    ),
    "S.pad": ("tokens", lambda plan, _: _has(plan, "tokens")),
    "S.padding": (
        "an axis S of the states that may be padded",
        lambda plan, _: _states(plan, "S") and not _is_flat(plan),
    ),
    "T.skip": (
        "a positive number, and a line with the axis T",
        lambda plan, _: plan.layout.settings["T.skip"] > 0 and any("T" in place.axes for place in plan.others),
    ),
    "S.prompt": ("a line for prompt_length", lambda plan, _: _gives(plan, "prompt_length", "answer_span")),
    "sample": (
        "a line for question_id that is an address",
        lambda plan, _: "sample" not in plan.layout.settings or _has(plan, "question_id"),
    ),
    "words": ("a label", lambda plan, _: bool({*plan.layout.addresses, *plan.layout.templates} & set(LABELS))),
    "share": (
        "a line for the field, and names that the states bind",
        lambda plan, name: (
            _gives(plan, name) and {"sample", *plan.names}.issuperset(map(str, plan.layout.settings[f"share.{name}"]))
        ),
    ),
    "keep": (
        "a line that binds the name, as in [id=id, status=status]",
        lambda plan, name: any(name in place.address.bound or given_name(place) == name for place in plan.places),
    ),
}


def _is_left_of_ids(plan: Plan) -> bool:
    return plan.layout.settings["S.side"] == "left" and type(plan.layout.settings.get("S.padding")) is int


def _is_flat(plan: Plan) -> bool:
    return any("NS" in place.axes for place in plan.states)
