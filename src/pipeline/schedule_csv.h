// Schedules as PyTorch's CSV: a row a rank, a cell a step. Pure.
//
// `compute_only` has the slots alone, `compute_comms` also messages and moves of parameters
// (program.h), which PyTorch runs as they stand. Both are read by one parser: what a file holds
// says which it is. Source: torch.distributed.pipelining, `_dump_csv` and `_load_csv`.
#pragma once

#include <string>
#include <string_view>

#include "pipeline/program.h"
#include "pipeline/schedule.h"

namespace tessera::pipeline {

std::string to_csv(const Schedule& schedule);  ///< compute_only
std::string to_csv(const Program& program);    ///< compute_comms

/// Empty cells and waits are left out, and empty rows at the end; rows end with \n or \r\n. A stage
/// lies where its first action stands; stages and micro-batches are as many as the highest number
/// says. Whether it can run is validate()'s to say. `name` stands in messages. Errors: kFormat with
/// row and cell.
Program parse_csv(std::string_view text, std::string_view name);

/// Whether the file said when messages are sent; without them they follow from lower().
bool has_messages(const Program& program);

}  // namespace tessera::pipeline
