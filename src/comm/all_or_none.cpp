#include "comm/all_or_none.h"

#include <algorithm>

#include "comm/group.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// An error as bytes: its kind, then the message; empty = none.
std::string encode(const std::exception& error) {
  const auto* known = dynamic_cast<const Error*>(&error);
  const ErrorKind kind = known == nullptr ? ErrorKind::kInternal : known->kind();
  return static_cast<char>('0' + static_cast<int>(kind)) + std::string(error.what());
}

/// Which rank it was matters where machines differ, not where the same thing was asked of all.
[[noreturn]] void rethrow(const std::string& bytes, std::size_t rank, bool of_all) {
  const auto kind = static_cast<ErrorKind>(bytes.front() - '0');
  const bool named = kind == ErrorKind::kIo && !of_all;
  throw Error(kind, concat(named ? concat("rank ", rank, ": ") : "", bytes.substr(1)));
}

}  // namespace

void on_all_or_none(World& world, const std::string& what, const std::function<void()>& action) {
  std::string mine;
  world.work_at(what);
  try {
    action();
  } catch (const std::exception& error) {
    mine = encode(error);
  }
  world.work_at("");
  if (!any_of_ranks(world.control(), {!mine.empty()}, what)[0]) return;
  const auto all = all_gather_bytes(world.control(), mine, what);
  const auto failed =
      std::find_if(all.begin(), all.end(), [](const auto& one) { return !one.empty(); });
  const auto equal = static_cast<std::size_t>(std::count(all.begin(), all.end(), *failed));
  rethrow(*failed, static_cast<std::size_t>(failed - all.begin()), equal == all.size());
}

std::string from_first_rank(World& world, const std::string& what, const std::string& text) {
  return all_gather_bytes(world.control(), world.rank() == 0 ? text : std::string(), what).front();
}

}  // namespace tessera::comm
