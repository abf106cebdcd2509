#include "pipeline/borders.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/test_hooks.h"
#include "comm/group.h"
#include "tessera/error.h"

namespace tessera::pipeline {
namespace {

constexpr std::string_view kGives = "gives to the stage after";
constexpr std::string_view kTakes = "takes from the stage before";

std::string range(int first, int last) {
  return first == last ? concat("micro-batch ", first) : concat("micro-batches ", first, "-", last);
}

/// A line a tensor, for the micro-batches that have the same.
void append_lines(std::string& text, const Boundary& boundary, const std::string& of) {
  const auto append = [&](const std::vector<BoundaryTensor>& tensors, std::string_view what) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      text += concat(of, ", ", what, " ", i, ": ", to_string(tensors[i]), "\n");
    }
  };
  append(boundary.activations, "tensor");
  append(boundary.back, "value back");
  if (boundary.activations.empty() && boundary.back.empty()) text += of + ": nothing\n";
}

void append_border(std::string& text, const Boundary* of_micro_batches, int count) {
  for (int first = 0; first < count;) {
    int last = first;
    while (last + 1 < count && of_micro_batches[last + 1] == of_micro_batches[first]) ++last;
    append_lines(text, of_micro_batches[first], range(first, last));
    first = last + 1;
  }
}

/// One end of a border: the stage, and whether it is the one that gives activations.
using End = std::pair<int, bool>;

struct Declared {
  int rank = 0;  ///< of the pipeline
  std::vector<std::string> lines;
};

void read_lines(const std::string& text, int rank, std::map<End, Declared>& ends) {
  std::istringstream lines(text);
  Declared* declared = nullptr;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("stage ")) {
      declared = &ends[{std::stoi(line.substr(6)), line.ends_with(kGives)}];
      declared->rank = rank;
    } else if (declared != nullptr) {
      declared->lines.push_back(line);
    }
  }
}

void require_same(int stage, const Declared& gives, const Declared& takes) {
  const auto [a, b] = std::ranges::mismatch(gives.lines, takes.lines);
  if (a == gives.lines.end() && b == takes.lines.end()) return;
  const auto line = [](const Declared& declared, auto at) {
    return at == declared.lines.end() ? "nothing more" : *at;
  };
  throw Error(ErrorKind::kContract,
              concat("border between stages ", stage, " and ", stage + 1, ": found that stage ",
                     stage, " (pipeline rank ", gives.rank, ") declares '", line(gives, a),
                     "' as its output and stage ", stage + 1, " (pipeline rank ", takes.rank, ") '",
                     line(takes, b), "' as its input, expected the same of both"));
}

void require_same_at_all(const std::vector<std::string>& texts, int stages) {
  std::map<End, Declared> ends;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    read_lines(texts[rank], static_cast<int>(rank), ends);
  }
  for (int stage = 0; stage + 1 < stages; ++stage) {
    require_same(stage, ends[{stage, true}], ends[{stage + 1, false}]);
  }
}

struct Words {
  std::uint64_t program = 0;
  std::uint64_t changed = 0;
  std::uint64_t step = 0;
};

}  // namespace

std::string to_string(const BoundaryTensor& tensor) {
  return concat(tensor.dtype, " ", at::IntArrayRef(tensor.shape),
                tensor.has_gradient ? " with a gradient" : "");
}

std::vector<BoundaryTensor> contents(const Boundary& boundary, Direction direction) {
  if (direction == Direction::kForward) return boundary.activations;
  std::vector<BoundaryTensor> tensors;
  for (const auto& activation : boundary.activations) {
    if (activation.has_gradient) tensors.push_back(activation);
  }
  tensors.insert(tensors.end(), boundary.back.begin(), boundary.back.end());
  return tensors;
}

void require_as_declared(const Tensors& found, const std::vector<BoundaryTensor>& declared,
                         const char* what) {
  TESSERA_CHECK(found.size() == declared.size(), ErrorKind::kContract, what, ": found ",
                found.size(), " tensors, expected ", declared.size(), " as declared");
  for (std::size_t i = 0; i < found.size(); ++i) {
    const at::Tensor& tensor = found[i];
    TESSERA_CHECK(tensor.defined() && tensor.layout() == at::kStrided, ErrorKind::kContract, what,
                  " ", i, ": found ", tensor.defined() ? "a sparse tensor" : "none", ", expected ",
                  to_string(declared[i]), " as declared");
    TESSERA_CHECK(tensor.sizes() == at::IntArrayRef(declared[i].shape) &&
                      tensor.scalar_type() == declared[i].dtype,
                  ErrorKind::kContract, what, " ", i, ": found ", tensor.scalar_type(), " ",
                  tensor.sizes(), ", expected ", to_string(declared[i]), " as declared");
  }
}

Borders::Borders(const Schedule& schedule, std::vector<int> ids, const std::vector<Stage*>& stages)
    : stages_(schedule.stages()), micro_batches_(schedule.micro_batches), ids_(std::move(ids)) {
  const auto require = [](const Boundary& boundary) {
    const auto back = std::ranges::count_if(boundary.activations, &BoundaryTensor::has_gradient) +
                      std::ssize(boundary.back);
    const auto most = std::max(std::ssize(boundary.activations), back);
    TESSERA_CHECK(most <= comm::P2PExtent::kTensors, ErrorKind::kContract,
                  "border of a stage: found ", most, " tensors in a direction, expected at most ",
                  comm::P2PExtent::kTensors, "; make one of several of a dtype");
    for (const auto& tensor : boundary.activations) {
      TESSERA_CHECK(!tensor.has_gradient || at::isFloatingType(tensor.dtype), ErrorKind::kContract,
                    "border of a stage: found a gradient of ", tensor.dtype,
                    ", expected a floating dtype, or has_gradient = false");
    }
  };
  for (std::size_t i = 0; i < stages.size(); ++i) {
    for (int k = 0; k < micro_batches_; ++k) {
      before_.push_back(ids_[i] > 0 ? stages[i]->input(k) : Boundary{});
      after_.push_back(ids_[i] + 1 < stages_ ? stages[i]->output(k) : Boundary{});
      require(before_.back());
      require(after_.back());
    }
  }
}

std::string Borders::in_lines() const {
  std::string text;
  for (std::size_t i = 0; i < ids_.size(); ++i) {
    if (ids_[i] > 0) {
      text += concat("stage ", ids_[i], " ", kTakes, "\n");
      append_border(text, &before_[at(i, 0)], micro_batches_);
    }
    if (ids_[i] + 1 < stages_) {
      text += concat("stage ", ids_[i], " ", kGives, "\n");
      append_border(text, &after_[at(i, 0)], micro_batches_);
    }
  }
  return text;
}

std::uint64_t Agreement::renew(comm::Group* group, const ValidProgram& program,
                               const Borders& borders, std::uint64_t step) {
  const bool same = agreed_ && *agreed_ == borders;
  const int stages = program.schedule().stages();
  if (group == nullptr) {
    if (!same) require_same_at_all({borders.in_lines()}, stages);
    agreed_ = borders;
    return step;
  }
  const Words mine{program.hash(), same ? 0U : 1U, step};
  const std::string bytes(reinterpret_cast<const char*>(&mine), sizeof(mine));
  Words all;
  const auto gathered = comm::all_gather_fixed(*group, bytes, "pipeline");
  for (std::size_t rank = 0; rank < gathered.size(); ++rank) {
    Words words;
    std::memcpy(&words, gathered[rank].data(), sizeof(words));
    if (rank == 0) all.program = words.program;
    TESSERA_CHECK(words.program == all.program, ErrorKind::kConfig, "pipeline: found on rank ",
                  rank,
                  " of the pipeline another schedule than on the first, or a step of another kind, "
                  "expected the same on all");
    all.changed |= words.changed;
    all.step = std::max(all.step, words.step);
  }
  if (all.changed == 0) return all.step;
  agreed_.reset();
  const auto all_lines = comm::all_gather_bytes(*group, borders.in_lines(), "borders of stages");
  if (!group->is_dry()) require_same_at_all(all_lines, stages);
  agreed_ = borders;
  return all.step;
}

comm::P2PTag::Direction p2p_direction(Direction direction) {
  using P2PDirection = comm::P2PTag::Direction;
  return direction == Direction::kForward ? P2PDirection::kForward : P2PDirection::kBackward;
}

comm::P2PTag Messages::tag(const HandOver& what, std::size_t index) const {
  return {step_, p2p_direction(what.direction), what.from, what.micro_batch,
          static_cast<std::int32_t>(index)};
}

void Messages::wait(const Open& open) {
  for (const auto& transfer : open.transfers) transfer->wait();
}

void Messages::post(const HandOver& what, int from, const std::vector<BoundaryTensor>& expected) {
  Open receive{what, {}, {}};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto options = at::TensorOptions().dtype(expected[i].dtype).device(device_);
    const auto& into = receive.tensors.emplace_back(at::empty(expected[i].shape, options));
    receive.transfers.push_back(p2p_.receive(from, tag(what, i), into));
  }
  receives_.emplace(what, std::move(receive));
}

Tensors Messages::wait_for(const HandOver& what) {
  const auto found = receives_.find(what);
  TESSERA_INVARIANT(found != receives_.end(), "no receive is posted of the ", to_string(what));
  wait(found->second);
  Tensors tensors = std::move(found->second.tensors);
  receives_.erase(found);
  return tensors;
}

void Messages::send(const HandOver& what, int to, Tensors tensors) {
  Open sent{what, std::move(tensors), {}};
  for (std::size_t i = 0; i < sent.tensors.size(); ++i) {
    const auto hook = test_hooks::sent_tag.get();
    const auto tagged = hook == nullptr ? tag(what, i) : (*hook)(tag(what, i));
    sent.transfers.push_back(p2p_.send(to, tagged, sent.tensors[i]));
  }
  sends_.push_back(std::move(sent));
}

void Messages::wait_for_send(const HandOver& what) {
  const auto found = std::ranges::find(sends_, what, &Open::what);
  if (found == sends_.end()) return;
  wait(*found);
  sends_.erase(found);
}

bool Messages::are_worth_asking(std::size_t sends, std::size_t bytes) {
  constexpr std::size_t kMostUnasked = 64;
  constexpr std::size_t kWorthAsking = std::size_t{1} << 20;
  return sends > kMostUnasked || bytes >= kWorthAsking;
}

void Messages::let_go() {
  std::size_t bytes = 0;
  for (const Open& sent : sends_) {
    for (const auto& tensor : sent.tensors) bytes += tensor.nbytes();
  }
  if (!are_worth_asking(sends_.size(), bytes)) return;
  std::erase_if(sends_, [](const Open& sent) {
    return std::ranges::all_of(sent.transfers,
                               [](const auto& transfer) { return transfer->done(); });
  });
}

}  // namespace tessera::pipeline
