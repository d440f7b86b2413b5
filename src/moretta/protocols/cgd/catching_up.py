"""The steps of groups' members: which members missed one, and how they get D from the others."""

from collections.abc import Iterable, Mapping, Sequence

from moretta.contract.messages import Stamp
from moretta.contract.roles import Aborted, Ask, Exchange, Missing, Reason, Replies, State
from moretta.errors import PeerError, RunFailed
from moretta.protocols.cgd.group_keys import NAME as EVERYBODY
from moretta.protocols.cgd.group_keys import at
from moretta.protocols.cgd.layers import Group
from moretta.protocols.cgd.messages import CatchUp, Displacement, Done, Here, ShowDisplacement, Where

LATE = Missing(Reason.DISCONNECTED, "it missed a sum and has not caught up")


class CatchingUp:
    """The aggregator's knowledge of each group's steps. groups: participants that share layers."""

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = groups
        self._behind: dict[str, set[str]] = {}  # by group, the members without the step of its last sum
        self._summed = dict.fromkeys(groups, 0)  # by group, the round of its last sum, or of one alone its last step
        self._known = False  # whether no sum can have been distributed that is not in `_summed`

    @property
    def late(self) -> set[str]:
        """The participants that missed a sum of a group and have not caught up."""
        return set[str]().union(*self._behind.values())

    def up_to_date(self, group: str, members: Sequence[str]) -> list[str]:
        """Return the members that have stepped by a group's last sum."""
        return [member for member in members if member not in self._behind[group]]

    def stepped(self, group: str, number: int, asked: Sequence[str], stepped: Iterable[str]) -> None:
        """Record that a group's sum of a round was sent, and the recipients that have stepped."""
        self._summed[group] = number
        self._behind[group] |= set(asked) - set(stepped)

    def alone(self, group: str, members: Iterable[str]) -> None:
        """Record members that may have stepped by a sum that most refused: their D may differ until the next step."""
        self._behind[group] |= set(members)

    def locate(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Ask all how many rounds' sums they have stepped by; those with another number get D from the others.

        The last sum is the one that this role distributed. After a resume from an older state, or as a relay that
        replaces another, it may not know that one. Then it is the last that at least half of the members report:
        otherwise one member could say that it is ahead, and give the others its D.

        Raises:
            RunFailed: All that have stepped by a group's last sum are missing.
        """
        replies = yield from self._whereabouts(now, cohort)
        if replies.missing:
            return Aborted(replies.missing)
        steps: Mapping[str, Here] = replies.answers
        for name, group in self._groups.items():
            far = {member: steps[member].steps[name] for member in group.members if member in steps}
            last = self._summed[name]
            if far and (len(group.members) == 1 or not self._known):  # one alone steps without a sum
                last = max(last, sorted(far.values(), reverse=True)[(len(far) - 1) // 2])
            self._summed[name] = last
            self._behind[name] = {member for member, number in far.items() if number != last}
            if far and len(self._behind[name]) == len(far):
                raise RunFailed(
                    f"round {now.round}: all members of group `{name}` that stepped by the sum of round {last} are "
                    "missing, and the others need D from one of them: bring one back"
                )
        self._known = True
        yield from self._bring_up(now, cohort)
        return None

    def look_again(self, now: Stamp, cohort: Sequence[str]) -> Exchange[None]:
        """Ask those behind for their step: perhaps only an answer was lost, and no member takes D twice."""
        late = [name for name in cohort if name in self.late]
        if not late:
            return
        replies = yield from self._whereabouts(now, late)
        for name, behind in self._behind.items():
            heard = behind & replies.answers.keys()
            behind -= {member for member in heard if replies.answers[member].steps[name] == self._summed[name]}
        yield from self._bring_up(now, cohort)

    def _whereabouts(self, now: Stamp, of: Sequence[str]) -> Exchange[Replies]:

        def check(silo: str, position: Here) -> None:
            mine = {name for name, group in self._groups.items() if silo in group.members}
            if position.steps.keys() != mine or any(number >= now.round for number in position.steps.values()):
                raise PeerError(f"expected its rounds in {sorted(mine)!r:.100}, all of them before round {now.round}")

        return (yield Ask.all(of, Where(stamp=at(now, EVERYBODY)), Here, check))

    def _bring_up(self, now: Stamp, cohort: Sequence[str]) -> Exchange[None]:
        """Have those behind take their group's D, sealed by a member that is up to date."""
        for name, behind in self._behind.items():
            ahead = [member for member in self._groups[name].members if member in cohort and member not in behind]
            present = [member for member in self._groups[name].members if member in behind and member in cohort]
            if not present or not ahead:
                continue
            stamp = at(now, name)
            for maker in ahead:
                shown = yield Ask({maker: ShowDisplacement(stamp=stamp)}, Displacement)
                if maker in shown.answers:
                    shown_state = shown.answers[maker]
                    message = CatchUp(stamp=stamp, maker=maker, sealed=shown_state.sealed, steps=shown_state.steps)
                    caught_up = yield Ask.all(present, message, Done)
                    behind.difference_update(caught_up.answers)
                    # One that refuses may take it from another; an unreachable one is not asked again.
                    present = [member for member, why in caught_up.missing.items() if why.reason is Reason.REFUSED]
                if not present:
                    break

    def state(self) -> State:
        """Return when each group was last summed."""
        return {f"summed/{name}": number for name, number in self._summed.items()}

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        self._summed = {name: int(state[f"summed/{name}"]) for name in self._groups}
        self._known = False  # the state may be older than the members' steps
