#include "tessera/mesh_shape.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <limits>

#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::string_view kHeadsPrefix = "tp_kv/";
constexpr std::string_view kCopiesPrefix = "tp_rep/";

std::optional<int> number_after(std::string_view prefix, std::string_view name) {
  if (!name.starts_with(prefix)) return std::nullopt;
  int number = 0;
  const auto* end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + prefix.size(), end, number);
  if (error != std::errc() || rest != end || number < 1) return std::nullopt;
  return number;
}

}  // namespace

MeshShape::MeshShape(std::vector<MeshAxis> axes) : axes_(std::move(axes)) {
  for (auto one = axes_.begin(); one != axes_.end(); ++one) {
    TESSERA_CHECK(one->size >= 1, ErrorKind::kConfig, "mesh: found size ", one->size, " (axis ",
                  one->name, "), expected at least 1");
    TESSERA_CHECK(std::none_of(axes_.begin(), one,
                               [&](const MeshAxis& other) { return other.name == one->name; }),
                  ErrorKind::kConfig, "mesh: found two axes named ", one->name);
  }
}

MeshShape MeshShape::dense(int pp, int dp_replicate, int dp_shard, int cp, int tp) {
  return MeshShape({{std::string(axis::kPipeline), pp},
                    {std::string(axis::kReplicate), dp_replicate},
                    {std::string(axis::kShard), dp_shard},
                    {std::string(axis::kContext), cp},
                    {std::string(axis::kTensor), tp}});
}

MeshShape MeshShape::sparse(int pp, int dp_replicate, int expert_data, int ep, int etp) {
  return MeshShape({{std::string(axis::kPipeline), pp},
                    {std::string(axis::kReplicate), dp_replicate},
                    {std::string(axis::kExpertData), expert_data},
                    {std::string(axis::kExpert), ep},
                    {std::string(axis::kExpertTensor), etp}});
}

int MeshShape::size() const {
  std::int64_t product = 1;
  for (const MeshAxis& one : axes_) {
    product *= one.size;
    TESSERA_CHECK(
        product <= std::numeric_limits<int>::max(), ErrorKind::kConfig,
        "mesh: found sizes whose product does not fit into 31 bits, expected fewer ranks");
  }
  return static_cast<int>(product);
}

std::optional<MeshShape::Span> MeshShape::span_of(std::string_view name) const {
  int stride = 1;
  for (auto one = axes_.rbegin(); one != axes_.rend(); ++one) {
    if (one->name == name) return Span{one->size, stride};
    if (one->name == axis::kTensor) {
      const auto heads = number_after(kHeadsPrefix, name);
      const auto copies = number_after(kCopiesPrefix, name);
      if (heads && one->size % *heads == 0) return Span{*heads, stride * (one->size / *heads)};
      if (copies && one->size % *copies == 0) return Span{*copies, stride};
    }
    stride *= one->size;
  }
  return std::nullopt;
}

int MeshShape::size_of(std::string_view name) const { return span_of(name).value_or(Span{}).size; }

int MeshShape::coordinate(int rank, std::string_view name) const {
  const Span span = span_of(name).value_or(Span{});
  return rank / span.stride % span.size;
}

void MeshShape::check_rank(int rank) const {
  TESSERA_CHECK(rank >= 0 && rank < size(), ErrorKind::kConfig, "mesh: found rank ", rank,
                ", expected 0 to ", size() - 1, " (", to_string(*this), ")");
}

std::vector<int> MeshShape::group_of(int rank, const std::vector<std::string_view>& names) const {
  check_rank(rank);
  std::vector<Span> spans;
  for (const std::string_view name : names) {
    if (const auto span = span_of(name); span && span->size > 1) spans.push_back(*span);
  }
  // Starts from the rank with all named coordinates 0 and lets them run, the last axis fastest: in
  // mesh order this counts upwards.
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.stride > b.stride; });
  std::vector<int> ranks = {rank};
  for (const Span& span : spans) {
    std::vector<int> next;
    next.reserve(ranks.size() * static_cast<std::size_t>(span.size));
    for (const int member : ranks) {
      const int first = member - member / span.stride % span.size * span.stride;
      for (int i = 0; i < span.size; ++i) next.push_back(first + i * span.stride);
    }
    ranks = std::move(next);
  }
  TESSERA_CHECK(
      std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end(),
      ErrorKind::kConfig,
      "mesh: found axes that overlap, expected each rank once; name tp or its parts, not both");
  return ranks;
}

std::string to_string(const MeshShape& shape) {
  std::string text;
  for (const MeshAxis& one : shape.axes()) {
    if (!text.empty()) text += " x ";
    text += concat(one.name, " ", one.size);
  }
  return text;
}

namespace {

int data_and_tensor_ranks(const MeshShape& dense) {
  return dense.size_of(axis::kShard) * dense.size_of(axis::kContext) * dense.size_of(axis::kTensor);
}

}  // namespace

MeshShapes::MeshShapes(MeshShape dense) : dense_(std::move(dense)) {
  MeshShape sparse =
      MeshShape::sparse(dense_.size_of(axis::kPipeline), dense_.size_of(axis::kReplicate),
                        dense_.size_of(axis::kShard) * dense_.size_of(axis::kContext), 1,
                        dense_.size_of(axis::kTensor));
  if (sparse.size() == dense_.size()) sparse_ = std::move(sparse);
}

MeshShapes::MeshShapes(MeshShape dense, MeshShape sparse)
    : dense_(std::move(dense)), sparse_(std::move(sparse)) {
  for (const auto name : {axis::kPipeline, axis::kReplicate}) {
    TESSERA_CHECK(dense_.size_of(name) == sparse_.size_of(name), ErrorKind::kConfig,
                  "mesh: found size ", sparse_.size_of(name), " (axis ", name,
                  " of the sparse mesh), expected the dense mesh's ", dense_.size_of(name));
  }
  const int of_experts = sparse_.size_of(axis::kExpertData) * sparse_.size_of(axis::kExpert) *
                         sparse_.size_of(axis::kExpertTensor);
  TESSERA_CHECK(data_and_tensor_ranks(dense_) == of_experts && dense_.size() == sparse_.size(),
                ErrorKind::kConfig, "mesh: found ", to_string(sparse_), " with ", to_string(dense_),
                ", expected dp_shard_mod_ep x ep x etp = dp_shard x cp x tp, two readings of the "
                "same ranks; change the degrees under [parallelism]");
}

bool MeshShapes::has_model_axes() const {
  return dense_.size_of(axis::kTensor) > 1 || sparse_.size_of(axis::kExpert) > 1 ||
         sparse_.size_of(axis::kExpertTensor) > 1;
}

const MeshShape& MeshShapes::with(std::string_view name) const {
  return dense_.has(name) ? dense_ : sparse_;
}

int MeshShapes::size_of(std::string_view name) const { return with(name).size_of(name); }

int MeshShapes::coordinate(int rank, std::string_view name) const {
  return with(name).coordinate(rank, name);
}

std::vector<int> MeshShapes::coordinates(int rank, const ParameterLayout& layout) const {
  std::vector<int> found;
  for (const AxisPlacement& one : layout.axes) {
    found.push_back(of(layout.mesh).coordinate(rank, one.axis));
  }
  return found;
}

std::vector<int> MeshShapes::ranks_of(int rank, const std::vector<std::string_view>& names) const {
  for (const MeshShape* shape : {&dense_, &sparse_}) {
    if (std::all_of(names.begin(), names.end(), [&](auto name) { return shape->has(name); })) {
      return shape->group_of(rank, names);
    }
  }
  std::string text;
  for (const auto name : names) {
    TESSERA_CHECK(dense_.has(name) || sparse_.has(name), ErrorKind::kConfig,
                  "mesh: found the axis ", name, ", expected one of ", to_string(*this));
    text += (text.empty() ? "" : ", ") + std::string(name);
  }
  TESSERA_CHECK(false, ErrorKind::kConfig, "mesh: found the axes ", text,
                " of two readings together, expected axes of one of ", to_string(*this));
  return {};
}

std::vector<int> MeshShapes::replica_of(int rank) const {
  return dense_.group_of(rank, {axis::kShard, axis::kContext, axis::kTensor});
}

std::vector<int> MeshShapes::stage_of(int rank) const {
  return dense_.group_of(rank, {axis::kReplicate, axis::kShard, axis::kContext, axis::kTensor});
}

std::string to_string(const MeshShapes& shapes) {
  std::string text = to_string(shapes.dense());
  const MeshShapes alone(shapes.dense());
  if (shapes != alone) text += concat(" and ", to_string(shapes.sparse()));
  return text;
}

HeadAxes tensor_axis_of_heads(int tp, int heads) {
  const std::string tensor(axis::kTensor);
  TESSERA_CHECK(tp >= 1 && heads >= 1 && (heads % tp == 0 || tp % heads == 0), ErrorKind::kConfig,
                "tensor parallelism: found ", heads, " heads of keys and values over ", tp,
                " ranks, expected one to divide the other; change "
                "parallelism.tensor_parallel_degree");
  if (heads % tp == 0) return {{tensor, tp}, {concat(kCopiesPrefix, 1), 1}};
  const int copies = tp / heads;
  if (heads == 1) return {{concat(kHeadsPrefix, 1), 1}, {tensor, copies}};
  return {{concat(kHeadsPrefix, heads), heads}, {concat(kCopiesPrefix, copies), copies}};
}

}  // namespace tessera
