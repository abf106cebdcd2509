// Schedules as PyTorch's CSV: a row a rank, a cell a step. Pure.
//
// `compute_only` has the slots alone, `compute_comms` also messages and moves of parameters
// (program.h), which PyTorch runs as they are. One parser reads both: the content of a file says
// which it is. Source: torch.distributed.pipelining, `_dump_csv` and `_load_csv`.
#pragma once

#include <string>
#include <string_view>

#include "pipeline/program.h"
#include "pipeline/schedule.h"

namespace tessera::pipeline {

std::string to_csv(const Schedule& schedule);  ///< compute_only
std::string to_csv(const Program& program);    ///< compute_comms

/// Skips empty cells, waits, and empty rows at the end; rows end with
///  or \r
/// . A stage lies where its first action is; the highest numbers give the counts of stages and
/// micro-batches. validate() says whether it can run. Messages contain `name`. Errors: kFormat with
/// row and cell.
Program parse_csv(std::string_view text, std::string_view name);

/// Whether the file said when messages are sent; without that they follow from lower().
bool has_messages(const Program& program);

}  // namespace tessera::pipeline
