#!/usr/bin/env python3
"""Reads a folder of event files as TensorBoard does and prints the scalars as JSON.

    read_events.py FOLDER        {"tag": [[step, value, wall_time], ...], ...}
"""

import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, SCALARS

accumulator = EventAccumulator(sys.argv[1], size_guidance={SCALARS: 0})
accumulator.Reload()
print(json.dumps({tag: [[event.step, event.value, event.wall_time]
                        for event in accumulator.Scalars(tag)]
                  for tag in accumulator.Tags()["scalars"]}))
