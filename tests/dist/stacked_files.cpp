#include "dist/stacked_files.h"

#include <cstring>

#include "grad/torch_dtype.h"

namespace tessera::test {
namespace {

constexpr const char* kExperts = "experts.";

std::string expert(std::int64_t number, const char* part) {
  return concat(kExperts, number, ".", part, "_proj.weight");
}

}  // namespace

StackedExperts::StackedExperts(std::uint64_t seed)
    : gate_up(register_parameter("gate_up", seeded(seed, {E, 2 * I, H}))),
      down(register_parameter("down", seeded(seed + 1, {E, H, I}))),
      norm(register_parameter("norm", seeded(seed + 2, {H}))) {}

StackedExperts::StackedExperts(const at::Tensor& gates, const at::Tensor& downs,
                               const at::Tensor& norms)
    : gate_up(register_parameter("gate_up", gates)),
      down(register_parameter("down", downs)),
      norm(register_parameter("norm", norms)) {}

Sharded<StackedExperts> shard_experts(const Mesh& mesh, std::uint64_t seed,
                                      bool norm_is_invariant) {
  constexpr auto E = StackedExperts::E, I = StackedExperts::I, H = StackedExperts::H;
  const int ep = mesh.size_of(axis::kExpert);
  const int etp = mesh.size_of(axis::kExpertTensor);
  const int tp = mesh.size_of(axis::kTensor);
  auto gates = layout_on(MeshKind::kSparse, {shard("ep", ep, 0), shard("etp", etp, 2)});
  gates.sharded_shape = {E, 2, I, H};
  const auto downs = layout_on(MeshKind::kSparse, {shard("ep", ep, 0), shard("etp", etp, 2)});
  const auto norms =
      layout_on(MeshKind::kDense, {norm_is_invariant ? invariant("tp", tp) : partial("tp", tp)});
  const StackedExperts whole(seed);
  const auto part = [&](const at::Tensor& tensor, const ParameterLayout& layout) {
    return local_part(tensor.detach(), layout, mesh);
  };
  ShardOptions options;
  options.layouts = {{"gate_up", gates}, {"down", downs}, {"norm", norms}};
  return fully_shard(
      std::make_shared<StackedExperts>(part(whole.gate_up, gates), part(whole.down, downs),
                                       part(whole.norm, norms)),
      mesh, {}, options);
}

at::Tensor StackedExperts::forward(const at::Tensor& x) {
  const auto both = at::matmul(x * norm, gate_up.transpose(1, 2));  // [E, N, 2I]
  const auto inner = at::silu(both.narrow(2, 0, I)) * both.narrow(2, I, I);
  return at::matmul(inner, down.transpose(1, 2)).sum(0);
}

std::vector<models::ParameterSpec> StackedExperts::table(std::int64_t experts) {
  models::ParameterSpec gates{.name = "gate_up", .shape = {experts, 2 * I, H}, .init_std = 0.02};
  models::ParameterSpec downs{.name = "down", .shape = {experts, H, I}, .init_std = 0.02};
  gates.stacked_shape = {I, H};
  downs.stacked_shape = {H, I};
  for (std::int64_t e = 0; e < experts; ++e) {
    gates.stacked.push_back(expert(e, "gate"));
    gates.stacked.push_back(expert(e, "up"));
    downs.stacked.push_back(expert(e, "down"));
  }
  return {gates, downs, {.name = "norm", .shape = {H}, .init = models::InitKind::kOnes}};
}

void TensorsInMemory::add(const std::string& name, const at::Tensor& values) {
  const DType dtype = to_dtype(values.scalar_type());
  tensors_[name] = {dtype, values.sizes().vec(), dtype};
  values_[name] = values.detach().clone().contiguous();
}

void TensorsInMemory::remove(const std::string& name) {
  tensors_.erase(name);
  values_.erase(name);
}

TensorsInMemory TensorsInMemory::of(const StackedExperts& model, at::ScalarType dtype) {
  TensorsInMemory source;
  for (std::int64_t e = 0; e < StackedExperts::E; ++e) {
    const auto both = model.gate_up[e].to(dtype);
    source.add(expert(e, "gate"), both.narrow(0, 0, StackedExperts::I));
    source.add(expert(e, "up"), both.narrow(0, StackedExperts::I, StackedExperts::I));
    source.add(expert(e, "down"), model.down[e].to(dtype));
  }
  source.add("norm", model.norm);
  return source;
}

void TensorsInMemory::read(std::string_view name, std::int64_t begin, std::int64_t end,
                           std::span<std::byte> out) const {
  const at::Tensor& values = values_.find(name)->second;
  const auto size = static_cast<std::int64_t>(values.element_size());
  TESSERA_INVARIANT(
      static_cast<std::int64_t>(out.size()) == (end - begin) * size && end <= values.numel(),
      "a buffer of another size");
  std::memcpy(out.data(), static_cast<const std::byte*>(values.const_data_ptr()) + begin * size,
              out.size());
}

}  // namespace tessera::test
