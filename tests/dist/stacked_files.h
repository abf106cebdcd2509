// A model whose experts are one parameter each layer and one tensor an expert in files.
#pragma once

#include <ATen/ATen.h>

#include <filesystem>

#include "dist/cut_modules.h"
#include "io/tensor_source.h"
#include "models/description.h"

namespace tessera::test {

/// Experts E, width I, hidden H; uses all of its parameters.
class StackedExperts : public torch::nn::Module {
 public:
  static constexpr std::int64_t E = 4, I = 6, H = 5;
  explicit StackedExperts(std::uint64_t seed = 0);
  StackedExperts(const at::Tensor& gates, const at::Tensor& downs, const at::Tensor& norms);
  at::Tensor forward(const at::Tensor& x);  ///< [N, H]
  at::Tensor gate_up, down, norm;

  /// Rows of a parameter table for it; E is how many experts the files have.
  static std::vector<models::ParameterSpec> table(std::int64_t experts = E);
};

/// Experts cut over ep, their inner width over etp; the norm partial or the same on all of tp.
Sharded<StackedExperts> shard_experts(const Mesh& mesh, std::uint64_t seed,
                                      bool norm_is_invariant = false);

/// Tensors in memory as a folder.
class TensorsInMemory final : public TensorSource {
 public:
  void add(const std::string& name, const at::Tensor& values);
  void remove(const std::string& name);
  /// The parameters of `model` under the names of files.
  static TensorsInMemory of(const StackedExperts& model, at::ScalarType dtype = at::kFloat);

  const std::filesystem::path& path() const override { return path_; }
  const Tensors& tensors() const override { return tensors_; }
  void read(std::string_view name, std::int64_t begin, std::int64_t end,
            std::span<std::byte> out) const override;

 private:
  std::filesystem::path path_ = "folder";
  Tensors tensors_;
  std::map<std::string, at::Tensor, std::less<>> values_;
};

}  // namespace tessera::test
