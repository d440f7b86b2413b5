"""All doors through which bytes of somebody else come in, by name."""

from __future__ import annotations

import model_doors
import peer_doors
import settings_doors
import table_doors

DOORS = {**peer_doors.DOORS, **settings_doors.DOORS, **table_doors.DOORS, **model_doors.DOORS}
