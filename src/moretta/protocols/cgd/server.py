"""The aggregator relays and adds up, and holds no model. A participant, or a party without data, may take this role."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moretta.contract import roles
from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import (
    Aborted,
    Ask,
    Exchange,
    Missing,
    Outcome,
    Phase,
    Reason,
    Report,
    State,
    all_of,
    side_by_side,
)
from moretta.contract.wording import LARGE_TARGETS
from moretta.data.holders import Grid
from moretta.engines.takes import opens
from moretta.errors import RunFailed
from moretta.protocols.cgd import messages, row_order
from moretta.protocols.cgd.catching_up import LATE, CatchingUp
from moretta.protocols.cgd.group_keys import NAME as EVERYBODY
from moretta.protocols.cgd.group_keys import at, row_groups
from moretta.protocols.cgd.layers import Group
from moretta.protocols.cgd.messages import Descend, Done, Scored
from moretta.protocols.cgd.params import CGD
from moretta.protocols.common import scoring
from moretta.protocols.common.enrolment import Enrolment, refused_by_all
from moretta.protocols.common.releases import watched
from moretta.protocols.common.setting import Setting
from moretta.secure_aggregation.agreement import agree_on_keys
from moretta.secure_aggregation.cohort import complete
from moretta.secure_aggregation.encoding import add_up
from moretta.secure_aggregation.sums import Relayed, to_leave_out

log = logging.getLogger("moretta")

IN_VAIN = 2  # successive rounds without a step after which the run fails


class Server:
    """Conducts Algorithms 1 and 2 over groups of participants.

    Args:
        groups: Participants that share layers.
        enrolments: The secure sum of each group of two or more, and its agreement.
        joint: Whether the participants of a row of the grid run one model together.
        blind: Whether sums are hidden from this role.
    """

    def __init__(
        self,
        params: CGD,
        setting: Setting,
        grid: Grid,
        groups: Mapping[str, Group],
        enrolments: Mapping[str, Enrolment],
        *,
        joint: bool,
        blind: bool,
    ) -> None:
        self.phase: Phase = roles.no_phase
        self._grid, self._groups, self._enrolments = grid, groups, enrolments
        self._joint, self._blind, self._align = joint, blind, params.align
        secure = setting.secure_aggregation
        self._rules, self._limit = complete(setting.rules(secure.scheme)), secure.largest
        self._comparison = setting.comparison
        self._rows = row_groups(grid) if joint else {}
        self._cohort: Sequence[str] = ()
        self._steps = CatchingUp(groups)
        self._why = dict[str, Missing]()  # the missing silos of the last attempt
        self._opening = False  # whether the opening of a sum of this round was requested
        self._in_vain = 0  # successive rounds without a step

    # Set-up

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Agree on all participants' keys, on each group's key and secure sum, and on each participant's steps."""
        aborted = yield from self._set_up(now, cohort)
        if aborted is not None:
            self._why = dict(aborted.missing)
        return aborted

    def _set_up(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        self._cohort = ()
        whole_rows = self._whole_rows(cohort)
        for name, group in self._groups.items():
            left = _of(whole_rows, group.members)
            if len(left) < min(2, len(group.members)):
                raise self._too_few(now, name, len(left))
        if len(cohort) > 1:
            agreed = yield from agree_on_keys(at(now, EVERYBODY), cohort, self._rules)
            if isinstance(agreed, Aborted):
                return agreed
        for stage in ({name: _of(cohort, names) for name, names in self._rows.items()}, *self._stages(cohort)):
            aborted = yield from all_of(
                {name: self._group_key(at(now, name), members) for name, members in stage.items() if len(members) > 1}
            )
            if aborted is not None:
                return aborted
        if self._align:
            whole = {row: names for row, names in self._rows.items() if names[0] in whole_rows}
            if aborted := (yield from row_order.align(now, whole)):
                return aborted
        there = whole_rows if self._align else cohort
        if self._comparison and (aborted := (yield from self._comparison.run(at(now, EVERYBODY), there))):
            return aborted
        for stage in self._stages(whole_rows):
            aborted = yield from all_of(
                {
                    name: self._enrolments[name].setup(at(now, name), members)
                    for name, members in stage.items()
                    if name in self._enrolments
                }
            )
            if aborted is not None:
                return aborted
        aborted = yield from row_order.compare(now, {row: _of(there, names) for row, names in self._rows.items()})
        if aborted is None:
            aborted = yield from self._steps.locate(now, cohort)
        if aborted is None:
            self._cohort = tuple(cohort)
        return aborted

    def _too_few(self, now: Stamp, group: str, left: int) -> RunFailed:
        why, *others = [f"{silo}: {missing.detail}" for silo, missing in self._why.items()] or [
            "the others are missing"
        ]
        why += f", and likewise {len(others)} others" if others else ""
        diverged = now.round > 1 and any(missing.reason is Reason.BAD_INPUT for missing in self._why.values())
        way_out = (
            f"the run has probably diverged: a lower learning rate or a decaying schedule helps, or {LARGE_TARGETS}"
            if diverged
            else "fix the others"
        )
        return RunFailed(
            f"round {now.round}: {left} of the {len(self._groups[group].members)} participants of group `{group}` can "
            f"take part, too few to sum ({why}); {way_out}"
        )

    def _stages(self, participants: Sequence[str]) -> list[dict[str, list[str]]]:
        """Return the groups, each with its present members, in stages: no participant is in two groups of a stage."""
        top = {name: _of(participants, group.members) for name, group in self._groups.items() if group.tells_loss}
        rest = {name: _of(participants, group.members) for name, group in self._groups.items() if not group.tells_loss}
        return [top, rest] if rest else [top]

    def _whole_rows(self, participants: Sequence[str]) -> list[str]:
        """Return the participants of complete rows, which can run their models."""
        if not self._joint:
            return list(participants)
        there = set(participants)
        return [name for names in self._rows.values() if there.issuperset(names) for name in names]

    def _group_key(self, now: Stamp, members: Sequence[str]) -> Exchange[Aborted | None]:
        """Have the first member draw the group's key, and pass it, sealed, to the others."""
        maker, *others = members
        drawn = yield Ask({maker: messages.DrawKey(stamp=now, members=tuple(members))}, messages.GroupKey)
        if drawn.missing:
            return Aborted(drawn.missing)
        sealed = drawn.answers[maker].sealed
        if set(sealed) != set(others):
            return Aborted({maker: Missing(Reason.MALFORMED, "expected a key sealed for each of the other members")})
        taken = yield Ask(
            {name: messages.TakeKey(stamp=now, maker=maker, sealed=sealed[name]) for name in others}, messages.KeyTaken
        )
        unopened = {name: [maker] for name, reply in taken.answers.items() if not reply.opened}
        missing = {**to_leave_out(unopened), **taken.missing}
        return Aborted(missing) if missing else None

    # One iteration

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        """Run one iteration: the rows' passes where columns are split, the groups' sums, and the descent."""
        self._opening = False
        if self._in_vain >= IN_VAIN:
            raise self._nothing_opens(now)
        if now.attempt == 0:
            yield from self._steps.look_again(now, self._cohort)
        late = self._steps.late
        taking_part = self._whole_rows([name for name in self._cohort if name not in late])
        gone = {name: LATE for name in self._cohort if name in late}
        if self._joint:
            rows = {row: names for row, names in self._rows.items() if names[0] in taking_part}
            passed = yield from side_by_side({row: self._row(at(now, row), names) for row, names in rows.items()})
            for missing in passed.values():
                gone |= missing
            if elsewhere := {name: why for name, why in gone.items() if why.spent is not None}:
                return Aborted(elsewhere)  # no sum was requested yet: the next take begins
            taking_part = [name for row, names in rows.items() if not passed[row] for name in names]
        sums, unopened = dict[str, _Summed](), dict[str, Missing]()
        for stage in self._stages(taking_part):
            results = yield from side_by_side(
                {
                    name: self._sum(at(now, name), name, members, gone)
                    for name, members in stage.items()
                    if name in self._enrolments
                }
            )
            sums |= {name: result for name, result in results.items() if not isinstance(result, Aborted)}
            aborted = [result for result in results.values() if isinstance(result, Aborted)]
            unopened |= {silo: why for stop in aborted for silo, why in stop.missing.items()}
            spent = any(why.spent for why in unopened.values())
            if aborted and not sums and (spent or not self._opening):
                self._why = unopened
                return Aborted(self._why, aborted[0].because, [silo for stop in aborted for silo in stop.opened])
            # Once a sum of this round is known, or its opening was requested, it is not requested again: two sums of
            # the same gradients, with and without one participant, differ by that one's own. A group whose sum failed
            # does not step in this round.
        refused = yield from self._descend(now, sums, taking_part)
        stepped = {name: result for name, result in sums.items() if name not in refused}
        in_vain = self._opening and not stepped
        why = unopened | {silo: missing for by in refused.values() for silo, missing in by.items()}
        self._why, self._in_vain = (why, self._in_vain + 1) if in_vain else ({}, 0)
        return self._report(stepped, taking_part)

    def _nothing_opens(self, now: Stamp) -> RunFailed:
        self._in_vain = 0  # missing silos may come back, so it is tried again
        why = "; ".join(f"{silo}: {missing.detail}" for silo, missing in self._why.items())
        return RunFailed(
            f"round {now.round}: in the last {IN_VAIN} rounds no group's sum could be opened and read ({why:.500}), so "
            "nobody stepped; fix these participants"
        )

    def _row(self, now: Stamp, names: Sequence[str]) -> Exchange[Mapping[str, Missing]]:
        """Run forward and backward passes of one row. Return its missing silos; such a row misses the round."""
        head, *others = names
        words = np.empty((0, 0), dtype=np.uint64)
        bits = messages.bits_of_z(len(names))
        if others:
            parts = yield Ask.all(others, messages.Forward(stamp=now, fraction_bits=bits), messages.Partial)
            if parts.missing:
                return parts.missing
            shapes = {part.words.shape for part in parts.answers.values()}
            if len(shapes) > 1:
                return {name: Missing(Reason.MALFORMED, "expected as many rows as the others have") for name in others}
            words = add_up([part.words for part in parts.answers.values()])
        joined = yield Ask({head: messages.Join(stamp=now, words=words, fraction_bits=bits)}, messages.Deltas)
        if joined.missing or not others:
            return joined.missing
        passed = yield Ask.all(others, messages.Backward(stamp=now, sealed=joined.answers[head].sealed), Done)
        return passed.missing

    def _sum(
        self, now: Stamp, group: str, members: Sequence[str], gone: Mapping[str, Missing]
    ) -> Exchange[_Summed | Aborted]:
        """Sum a group's gradients: line 8 of Algorithm 1, lines 19 to 24 of Algorithm 2."""
        enrolment, shapes = self._enrolments[group], self._groups[group].summed
        if len(members) < 2:
            return Aborted(gone, f"{len(members)} participants of group `{group}` can take part, too few to sum")
        aggregation = enrolment.aggregation
        limits = dict.fromkeys(shapes, self._limit)
        request = aggregation.want(shapes, limits, enrolment.most_weight, blinded=self._blind)
        encoding = request.fraction_bits
        ask: dict[str, Message] = {member: messages.Contribute(stamp=now, encoding=encoding) for member in members}

        def note(ask: Ask) -> None:  # once such a message is sent, answers may arrive in any case
            self._opening |= opens(ask)

        if self._blind:
            relayed = yield from watched(aggregation.relay(ask, request), note)
            return relayed if isinstance(relayed, Aborted) else _Summed(relayed, encoding, {})
        total = yield from watched(aggregation.sum(ask, request), note)
        if isinstance(total, Aborted):
            return total
        figures = {"ring_step": max(total.steps.values())}
        if "loss" in total.means:
            figures |= {"loss": float(total.means["loss"]), "rows": float(total.weight)}
        return _Summed(Relayed(total.means, np.array(total.weight), total.silos), encoding, figures)

    def _descend(
        self, now: Stamp, sums: Mapping[str, _Summed], taking_part: Sequence[str]
    ) -> Exchange[Mapping[str, Mapping[str, Missing]]]:
        """Send each group its sum. A member that does not take it is behind until it has caught up.

        All members receive one message, so those that follow the protocol answer alike. Where more refuse it than take
        it, the group has not stepped: otherwise one silo could spoil the sum, say that it has stepped, and give the
        others its D.

        Returns:
            By such a group, who refused.

        Raises:
            RunFailed: As many take a sum as refuse it.
        """
        spoilt = dict[str, Mapping[str, Missing]]()
        for stage in self._stages(self._cohort):
            asks, receivers = dict[str, Message](), dict[str, list[str]]()
            for name, members in stage.items():
                receivers[name] = self._steps.up_to_date(name, members)
                if name in sums:
                    message = _carried(Descend, at(now, name), sums[name].relayed, sums[name].encoding)
                    asks |= {member: message for member in receivers[name] if member in self._enrolments[name].cohort}
                elif name not in self._enrolments:
                    asks |= {
                        member: messages.StepAlone(stamp=at(now, name)) for member in members if member in taking_part
                    }
            if not asks:
                continue
            replies = yield Ask(asks, Done)
            for name in stage.keys() & sums.keys():
                asked = [member for member in receivers[name] if member in self._enrolments[name].cohort]
                took = replies.answers.keys() & set(asked)
                missing = {member: why for member, why in replies.missing.items() if member in asked}
                refused = {member: why for member, why in missing.items() if why.reason is Reason.REFUSED}
                if not refused or len(refused) < len(took):
                    self._steps.stepped(name, now.round, receivers[name], replies.answers)
                    continue
                first = min(refused)
                if len(refused) == len(took):
                    raise RunFailed(
                        f"round {now.round}: as many members of group `{name}` took its sum as refused it ({first}: "
                        f"{refused[first].detail}), so nobody can tell which of them are right; fix these participants"
                    )
                spoilt[name] = refused
                log.warning(
                    "%s: %d of %d members of group `%s` refused the sum, so it has not stepped: %s: %s",
                    *(now, len(refused), len(asked), name, first, refused[first].detail),
                )
                self._steps.alone(name, set(asked) - refused.keys())
        return spoilt

    def _report(self, sums: Mapping[str, _Summed], taking_part: Sequence[str]) -> Report:
        """Report who took part, and the figures of sums that are not blind."""
        left_out = self._enrolments.keys() - sums.keys()
        figures: dict[str, float] = {"participants": float(len(taking_part)), "groups_left_out": float(len(left_out))}
        for summed in sums.values():
            figures |= {name: max(value, figures.get(name, value)) for name, value in summed.figures.items()}
        return Report(figures)

    def finish(self, now: Stamp) -> Exchange[Outcome | Aborted]:
        """Release nothing, as this role has no model, but let participants that missed a step catch up."""
        if aborted := (yield from self._steps.locate(now, self._cohort)):
            return aborted
        outcome = Outcome(parameters={}, facts={"participants": float(len(self._grid.parts))})
        everybody = next((name for name, group in self._groups.items() if group.tells_loss), "")
        enrolment = self._enrolments.get(everybody)
        if enrolment is None or not enrolment.figures:
            return outcome
        if self._blind:
            return (yield from self._score_blindly(at(now, everybody), outcome, enrolment))
        return (yield from enrolment.scored(at(now, everybody), outcome, {}))

    def _score_blindly(self, now: Stamp, outcome: Outcome, enrolment: Enrolment) -> Exchange[Outcome | Aborted]:
        """Relay the sum of the participants' scores, which only they can read. One that does not take it has none."""
        ask, request = scoring.ask_for(enrolment.aggregation, now, {}, enrolment.figures, blinded=True)
        relayed = yield from enrolment.aggregation.relay(ask, request)
        if isinstance(relayed, Aborted):
            return outcome if refused_by_all(relayed, enrolment.aggregation.cohort, now) else relayed
        yield Ask.all(enrolment.cohort, _carried(Scored, now, relayed, request.fraction_bits), Done)
        return outcome

    def state(self) -> State:
        """Return the groups' lasting agreement, their columns' standardisation, and each group's last sum."""
        agreed = dict[str, Any]()
        for name, enrolment in self._enrolments.items():
            agreed |= roles.over(f"{name}/", enrolment.state())
        return {**agreed, **self._steps.state()}

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        self._steps.restore(state)
        for name, enrolment in self._enrolments.items():
            enrolment.restore(roles.under(f"{name}/", state))


@dataclass(frozen=True)
class _Summed:
    """A group's sum, its encoding, and what this role may report of it."""

    relayed: Relayed
    encoding: Mapping[str, int]
    figures: Mapping[str, float]


def _carried(
    kind: type[Descend | Scored], now: Stamp, relayed: Relayed, encoding: Mapping[str, int]
) -> Descend | Scored:
    tensors, weight, silos = relayed.tensors, relayed.weight, tuple(relayed.silos)
    return kind(stamp=now, tensors=tensors, weight=weight, silos=silos, encoding=encoding)


def _of(participants: Sequence[str], members: Sequence[str]) -> list[str]:
    """Return the members among these participants, in the members' order."""
    there = set(participants)
    return [name for name in members if name in there]
