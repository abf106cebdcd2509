// Mistakes: what is wrong on purpose in runs that `tessera check` and the guard have to find and
// name.
//
// kinds.def lists the kinds. A mistake is one of a kind at a place that a right run of the layout
// goes through: a transition, a parameter, a collective. What goes in is injection.h's; whether a
// finding has the right name is decided here, by what was put in and not by what was found. Next:
// kinds.def.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "check/finding.h"
#include "check/injection.h"
#include "train/config/config.h"
#include "train/hf/model_source.h"
#include "train/small/small_run.h"
#include "unit/train/drawn_run.h"

namespace tessera::mistakes {

using train::Drawn;
using train::Draws;

enum class Kind : std::uint8_t {
#define TESSERA_MISTAKE(kind, use, what, seen) k##kind,
#include "check/kinds.def"
#undef TESSERA_MISTAKE
};

enum class Use : std::uint8_t {
  kKnown,     ///< the checker was built with it in view
  kHeldBack,  ///< put in only when the checker stood
};

struct KindOfMistake {
  Kind kind;
  Use use;
  std::string_view name;  ///< "DroppedSumForward"
  std::string_view what;
  std::string_view seen;
};
/// All of kinds.def, in its order.
const std::vector<KindOfMistake>& kinds();
const KindOfMistake& of(Kind kind);

/// The check that finds a kind.
enum class Finder : std::uint8_t { kCheck, kGuard };
Finder finder_of(Kind kind);

/// A right run of a drawn layout.
struct Ground {
  const Drawn& layout;
  const train::Config& config;
  const train::ModelSource& source;
  train::SmallRun run;
  /// Sees what the right run goes through; empty for what is seen without it.
  std::function<const train::SeenRun&()> seen;
};

struct Mistake {
  Kind kind;
  std::string place;
  Changes changes;
  /// Whether the finding names what was put in.
  std::function<bool(const check::Finding&)> named_by;
};

/// Makes the layout one in which the kind may have a place; false where it has none.
bool suit(Kind kind, Drawn& layout);
/// The same of its configuration.
void suit(Kind kind, train::Config& config);
/// None where the layout has no place for it.
std::optional<Mistake> draw_mistake(Kind kind, Draws& draws, const Ground& ground);

}  // namespace tessera::mistakes
