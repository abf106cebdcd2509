// MistakenRun: a drawn layout, its configuration, and a mistake in it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "check/mistakes.h"
#include "support/temporary_folder.h"
#include "train/config/config_resolve.h"

namespace tessera::mistakes {

class MistakenRun {
 public:
  /// Null where the seed has no place for the kind.
  static std::unique_ptr<MistakenRun> draw(Kind kind, std::uint32_t seed) {
    constexpr std::uint32_t kLayouts = 64;
    for (std::uint32_t number = 0; number < kLayouts; ++number) {
      Drawn layout = train::drawn(seed * kLayouts + number);
      if (!suit(kind, layout)) continue;
      std::unique_ptr<MistakenRun> run(new MistakenRun(kind, std::move(layout)));
      Draws draws(seed);
      run->mistake_ = draw_mistake(kind, draws, run->ground_);
      return run->mistake_ ? std::move(run) : nullptr;
    }
    return nullptr;
  }

  const Ground& ground() const { return ground_; }
  const train::Config& config() const { return config_; }
  const train::ModelSource& source() const { return source_; }
  const Mistake& mistake() const { return *mistake_; }
  int ranks() const { return layout_.ranks(); }
  std::string layout() const {
    std::ostringstream words;
    words << layout_;
    return words.str();
  }

 private:
  MistakenRun(Kind kind, Drawn layout)
      : layout_(std::move(layout)),
        config_(config(kind)),
        source_(train::open_model(config_.model, config_.lora)),
        ground_{layout_, config_, source_, small(), [this]() -> const auto& { return seen(); }} {}

  train::Config config(Kind kind) const {
    train::Config config = config_of(folder_, layout_);
    suit(kind, config);
    train::write_model(folder_, layout_.family + "-fp32", train::make_room_for_bytes);
    return config;
  }
  train::SmallRun small() const {
    return train::small_run(config_, source_,
                            train::resolve_parallelism(config_.parallelism, ranks()));
  }
  const train::SeenRun& seen() {
    if (!seen_) seen_ = train::run_small(ground_.run);
    TESSERA_INVARIANT(seen_->refused.empty(), "a right run: ", seen_->refused);
    return *seen_;
  }

  const TemporaryFolder folder_;
  const Drawn layout_;
  const train::Config config_;
  const train::ModelSource source_;
  std::optional<train::SeenRun> seen_;
  const Ground ground_;
  std::optional<Mistake> mistake_;
};

}  // namespace tessera::mistakes
