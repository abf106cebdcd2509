// How many ranks share a model, and in which form: the layouts that tests go through.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "golden/layouts.h"
#include "layout/parallel_dims.h"
#include "models/model_spec.h"
#include "train/config/config.h"

namespace tessera::golden {

struct Degrees {
  int replicate = 1;
  int shard = 1;
  int tp = 1;
  int ep = 1;
  int etp = 1;
  bool sequence = true;  ///< sequence parallel
  RouterTokens router = RouterTokens::kShards;
  int cp = 1;
  ContextForm form = ContextForm::kGather;
  int ranks() const { return replicate * shard * cp * tp; }
};
std::string to_string(const Degrees& degrees);

enum class Experts { kNone, kSome };
/// All of 1, 2 and 4 ranks that can be: forms of one layout (sequence, router) only where they
/// differ.
std::vector<Degrees> all_degrees(Experts experts);
/// A few of them: each axis alone, each pair, and every form of sequence, router and experts.
std::vector<Degrees> one_of_each_form(Experts experts);

// Reads the spec of a folder of tests/golden/data.

models::ModelSpec spec_of(const std::string& folder);
Experts experts_of(const std::string& folder);
/// Which tp has to divide.
std::int64_t heads_of(const std::string& folder);
/// Those of keys and values, of each kind of layers; the form kHeads shares them out.
std::vector<std::int64_t> kv_heads_of(const std::string& folder);
/// Whether layers have a recurrent state, which ranks of cp do not pass.
bool has_state(const models::ModelSpec& spec);
/// The first size that this tp does not divide, as the refusal names it.
std::string undivided_heads(const std::string& folder, int tp);

/// In fp32, of a folder of tests/golden/data.
train::Config config_for(const std::string& folder, const Degrees& degrees);
Layout layout_of(const Degrees& degrees);

/// The folder of [Note: sinks] (narrow_layouts_test.cpp).
inline constexpr const char* kSinksFolder = "gpt-oss-fp32";
/// Under bf16, a gradient that one run says too little about: sinks of that folder are compared in
/// many copies, not in one.
bool is_one_draw(const std::string& folder, const std::string& name, const Degrees& degrees);

}  // namespace tessera::golden
