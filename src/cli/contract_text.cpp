#include "cli/contract_text.h"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/text/alike.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::cli {
namespace {

template <class Contract>
std::vector<Contract> folded_all(const std::vector<Contract>& all) {
  const auto name_of = [](const Contract& one) { return one.name; };
  const auto same = [](Contract one, const Contract& other) {
    one.name = other.name;
    return one == other;
  };
  std::vector<Contract> shown;
  for (auto& group : alike(all, name_of, same)) {
    shown.push_back(group.first);
    shown.back().name = group.shown(group.first.name);
  }
  return shown;
}

/// Bytes of the elements of the line above.
std::string bytes_line(const layout::BucketPlan& bucket) {
  const auto moved = [&](const char* verb, std::int64_t bytes) {
    return concat(", ", verb, " ", size_text(bytes), " (sends ",
                  size_text(layout::sent_bytes(bytes, bucket.ranks)), ")");
  };
  std::string text = concat("    a rank keeps ", size_text(layout::shard_bytes(bucket)),
                            moved("gathers", layout::gathered_bytes(bucket)));
  if (bucket.key.trainable) text += moved("reduces", layout::reduced_bytes(bucket));
  return text + "\n";
}

/// A parameter in its bucket.
struct Line {
  layout::Placed placed;
  std::string name;
};

std::string parameters_text(const std::vector<Line>& lines, Layers layers) {
  const auto name_of = [&](const Line& line) {
    return layers == Layers::kFolded ? line.name : std::string();
  };
  const auto same = [](const Line& one, const Line& other) {
    return one.placed.numel == other.placed.numel;
  };
  std::string text;
  for (const auto& group : alike(lines, name_of, same)) {
    const auto& [placed, name] = group.first;
    text += concat("    ", placed.offset, " .. ", placed.offset + placed.numel, "  ",
                   group.shown(name), "\n");
  }
  return text;
}

/// `of`: the units that this one stands for.
std::string unit_text(const layout::PlannedUnit& unit, const Alike<layout::PlannedUnit>& of,
                      Layers layers) {
  std::string text = concat("unit ", unit_label(of.shown(unit.plan.name)), "\n");
  for (std::size_t b = 0; b < unit.plan.buckets.size(); ++b) {
    const layout::BucketPlan& bucket = unit.plan.buckets[b];
    text += concat("  bucket ", b, ": ", to_string(bucket.key), "\n    ", bucket.numel,
                   " elements, ", layout::padding_numel(bucket), " padding, ", bucket.ranks, " x ",
                   bucket.slice_numel(), "\n", bytes_line(bucket));
    std::vector<Line> lines;
    for (const layout::Placed& placed : bucket.parameters) {
      std::string name = unit.items.at(placed.parameter).name;
      if (const auto parts = layer_name(name); parts && of.numbers.size() > 1) {
        name = concat(parts->before, "{", ranges_text(of.numbers, ","), "}", parts->after);
      }
      lines.push_back({placed, std::move(name)});
    }
    text += parameters_text(lines, layers);
  }
  return text;
}

/// But for the number in the unit's name, which those of its parameters have, too.
bool same_units(const layout::PlannedUnit& one, const layout::PlannedUnit& other) {
  if (one.plan.buckets != other.plan.buckets || one.items.size() != other.items.size()) {
    return false;
  }
  const auto parts = [](const layout::PlanItem& item) {
    const auto name = layer_name(item.name);
    return name ? std::pair(name->before, name->after) : std::pair(item.name, std::string());
  };
  return std::ranges::equal(one.items, other.items, {}, parts, parts);
}

}  // namespace

ModelContract folded(const ModelContract& contract) {
  return {folded_all(contract.parameters), folded_all(contract.buffers),
          folded_all(contract.units)};
}

std::string fits_text(std::int64_t room, std::int64_t taken) {
  return concat(size_text(room),
                taken <= room ? concat(": fits, ", size_text(room - taken), " left")
                              : concat(": does not fit, ", size_text(taken - room), " too much"));
}

std::string plan_text(const layout::ModelPlan& plan, Layers layers) {
  const auto name_of = [&](const layout::PlannedUnit& unit) {
    return layers == Layers::kFolded ? unit.plan.name : std::string();
  };
  std::string text;
  for (const auto& group : alike(plan.units, name_of, same_units)) {
    text += unit_text(group.first, group, layers);
  }
  return text;
}

}  // namespace tessera::cli
