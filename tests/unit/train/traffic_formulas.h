// docs/communication.md's formulas of activations, as a program: what one rank sends in a step.
//
// Written down once more, from the document and not from the code. Micro-batches have one row.
#pragma once

#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "models/model_spec.h"
#include "train/config/config.h"

namespace tessera::train {

constexpr std::int64_t kExperts = 8;

struct Sent {
  std::int64_t count = 0;
  std::int64_t bytes = 0;
  bool operator==(const Sent&) const = default;
};
inline void PrintTo(const Sent& sent, std::ostream* out) {
  *out << sent.count << " of " << sent.bytes << " B together";
}
/// By "axis kind".
using Activations = std::map<std::string, Sent>;

enum class Mlps { kDense, kRouted, kRoutedAndShared, kGemma };

struct Family {
  std::string name;
  Mlps mlps = Mlps::kDense;
  std::int64_t dense_layers = 0;  ///< in front of those with experts
};
inline std::ostream& operator<<(std::ostream& out, const Family& family) {
  return out << family.name;
}

/// Which experts a token chooses.
enum class Chosen {
  kAll,       ///< every one: what goes where is known for any router
  kTheSame3,  ///< three, the same for all tokens: all weights are zero
};

/// In which dtypes activations are, and their sums.
enum class Dtypes { kFloat32, kBFloat16, kBFloat16SumsIn32 };

struct Degrees {
  std::string name;
  int replicate = 1;
  int shard = 1;
  int tp = 1;
  int ep = 1;
  int etp = 1;
  bool sequence = true;
  RouterTokens router = RouterTokens::kShards;
  RecomputeMode recompute = RecomputeMode::kNone;
  std::int64_t micro_batches = 1;
  std::int64_t positions = 16;
  Dtypes dtypes = Dtypes::kFloat32;
  Chosen chosen = Chosen::kAll;
  int cp = 1;
  ContextForm form = ContextForm::kGather;
  int data_ranks() const { return replicate * shard; }
  int ranks() const { return data_ranks() * cp * tp; }
  std::int64_t positions_of_rank() const { return positions / cp; }
  std::int64_t experts_per_token() const { return chosen == Chosen::kAll ? kExperts : 3; }
};
inline std::ostream& operator<<(std::ostream& out, const Degrees& degrees) {
  return out << degrees.name;
}

class Formulas {
 public:
  Formulas(const models::ModelSpec& spec, const Family& family, const Degrees& degrees, int rank);

  Activations of_step();
  /// Calls of experts in a step.
  std::int64_t expert_calls() const;

 private:
  enum class Way { kOwn, kSliced, kCut, kAllRouted };
  Way way() const;
  bool sums_at_exit() const { return way() != Way::kOwn; }
  bool routed(std::int64_t layer) const {
    return family_.mlps != Mlps::kDense && layer >= family_.dense_layers;
  }

  void add(const std::string& what, std::int64_t bytes);
  /// A part of the stream from each other rank: (n - 1) / n X.
  std::int64_t part() const { return stream_ / d_.tp * (d_.tp - 1); }
  std::int64_t whole_sum() const;
  void enter();
  void leave();
  /// Norms of queries and of keys, where a family norms all heads together; as often in backward.
  void norms_over_heads();
  void enter_backward();
  void leave_backward();
  /// Keys and values over cp, of parts that all begin within the first 32 positions.
  void attend(std::int64_t layer);
  void attend_backward(std::int64_t layer);
  struct Attended {
    std::int64_t queries,
        keys;               ///< numbers of a position: of queries or results; of keys or values
    std::int64_t gathered;  ///< that are gathered of it
  };
  Attended attended(std::int64_t layer) const;
  /// Positions whose keys others reach, by the closed formula of a causal mask.
  std::int64_t reached_by_others() const;
  void embedding();
  void head();
  void forward(std::int64_t layer);
  void backward(std::int64_t layer);
  void dispatch();
  int entries() const { return family_.mlps == Mlps::kGemma ? 2 : 1; }
  bool has_dense_block(std::int64_t layer) const;
  std::int64_t tokens_of(int rank) const;
  std::int64_t experts_here(int coordinate) const;

  const models::ModelSpec& spec_;
  const Family& family_;
  const Degrees& d_;
  int rank_;
  std::int64_t stream_;  ///< X: elements of a rank's positions of a micro-batch of one row
  std::int64_t e_;       ///< bytes of an element
  std::int64_t w_;       ///< of an addend that travels
  std::vector<std::int64_t> chosen_;
  Activations sent_;
};

}  // namespace tessera::train
