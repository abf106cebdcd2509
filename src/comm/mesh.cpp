#include "tessera/mesh.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera {

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
  TESSERA_CHECK(cp == 1, ErrorKind::kConfig, "mesh: found size ", cp,
                " (axis cp), expected 1; context parallelism is not yet built");
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

bool MeshShape::has(std::string_view name) const {
  return std::any_of(axes_.begin(), axes_.end(),
                     [&](const MeshAxis& one) { return one.name == name; });
}

int MeshShape::size_of(std::string_view name) const {
  for (const MeshAxis& one : axes_) {
    if (one.name == name) return one.size;
  }
  return 1;
}

int MeshShape::coordinate(int rank, std::string_view name) const {
  int stride = 1;
  for (auto one = axes_.rbegin(); one != axes_.rend(); ++one) {
    if (one->name == name) return rank / stride % one->size;
    stride *= one->size;
  }
  return 0;
}

std::vector<int> MeshShape::group_of(int rank, const std::vector<std::string_view>& names) const {
  TESSERA_CHECK(rank >= 0 && rank < size(), ErrorKind::kConfig, "mesh: found rank ", rank,
                ", expected 0 to ", size() - 1, " (", to_string(*this), ")");
  // Start from the rank with all named coordinates 0, then let them run, the last axis fastest:
  // taken in mesh order this counts upwards.
  std::vector<int> ranks = {rank};
  int stride = size();
  for (const MeshAxis& one : axes_) {
    stride /= one.size;
    if (std::find(names.begin(), names.end(), one.name) == names.end()) continue;
    std::vector<int> next;
    next.reserve(ranks.size() * static_cast<std::size_t>(one.size));
    for (const int member : ranks) {
      const int first = member - member / stride % one.size * stride;
      for (int i = 0; i < one.size; ++i) next.push_back(first + i * stride);
    }
    ranks = std::move(next);
  }
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

Mesh::Mesh(std::shared_ptr<World> world, MeshShape shape)
    : world_(std::move(world)), shape_(std::move(shape)) {
  TESSERA_CHECK(world_ != nullptr, ErrorKind::kUsage, "mesh: found no world");
  TESSERA_CHECK(shape_.size() == world_->size(), ErrorKind::kConfig, "mesh: found ", shape_.size(),
                " ranks (", to_string(shape_), "), expected the world's ", world_->size(),
                "; change the degrees under [parallelism] or the number of ranks");
}

int Mesh::coordinate(std::string_view name) const {
  return shape_.coordinate(world_ ? world_->rank() : 0, name);
}

}  // namespace tessera
