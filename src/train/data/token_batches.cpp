#include "train/data/token_batches.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/random.h"
#include "base/text/printable.h"
#include "io/token_source.h"
#include "nn/loss.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/data/data_files.h"
#include "train/data/document_rows.h"
#include "train/data/source_draw.h"
#include "train/data/source_tokens.h"

namespace tessera::train {
namespace {

/// Rows of seq_len + 1 tokens: whole documents, or chunks that do not overlap, whose remainder is
/// dropped.
struct SourceRows {
  std::unique_ptr<TokenSource> tokens;
  std::optional<DocumentRows> documents;
  RowOrder order;
  std::int64_t count;
  std::string packing;        ///< a line about it, or nothing
  std::uint64_t borders = 0;  ///< a hash of where documents end

  std::vector<DocumentPiece> pieces(std::int64_t row, std::int64_t row_tokens) const {
    if (!documents) return {{row * row_tokens, row_tokens}};
    const auto of_row = documents->row(row);
    return {of_row.begin(), of_row.end()};
  }
};

/// Destinations of one row: inputs and targets, with one input more than the row has, and for
/// packed rows starts (nn/documents.h) and fillers (MicroBatch).
struct RowPlaces {
  std::int64_t* inputs;
  std::int64_t* targets;
  std::int64_t* starts;
  bool* fillers;

  void next(std::int64_t row_tokens) {
    inputs += row_tokens;
    targets += row_tokens;
    if (starts != nullptr) starts += row_tokens;
    if (fillers != nullptr) fillers += row_tokens;
  }
  /// Marks the places [begin, end), as far as the row has them.
  void begin_document(std::size_t begin, std::size_t end, std::size_t row_tokens) const {
    if (starts == nullptr || begin >= row_tokens) return;
    std::fill(starts + begin, starts + std::min(end, row_tokens), static_cast<std::int64_t>(begin));
  }
  /// Marks the places from `begin` on as fillers.
  void leave_empty(std::size_t begin, std::size_t row_tokens) const {
    if (fillers != nullptr && begin < row_tokens)
      std::fill(fillers + begin, fillers + row_tokens, true);
  }
};

class TokenBatches final : public BatchSource {
 public:
  TokenBatches(std::vector<SourceRows> sources, std::optional<SourceDraw> draw,
               std::int64_t seq_len, std::int64_t rows_in_step, const Vocabulary& vocabulary)
      : sources_(std::move(sources)),
        draw_(std::move(draw)),
        seq_len_(seq_len),
        rows_in_step_(rows_in_step),
        vocab_size_(vocabulary.size),
        lengths_count_(vocabulary.lengths_count),
        packs_(std::ranges::any_of(
            sources_, [](const SourceRows& rows) { return rows.documents.has_value(); })) {}

  std::int64_t rows_in_step() const override { return rows_in_step_; }
  std::int64_t row_tokens() const override { return seq_len_; }
  std::int64_t rows_in_pass() const override { return sources_.front().count; }

  MicroBatch load(std::int64_t step, RowRange rows) const override {
    // A row's last token is the input of nothing: it is read into the place behind the row.
    const std::int64_t places_of_rows = rows.size() * seq_len_;
    MicroBatch batch{at::empty({places_of_rows + 1}, at::kLong)
                         .narrow(0, 0, places_of_rows)
                         .view({rows.size(), seq_len_}),
                     at::empty({rows.size(), seq_len_}, at::kLong)};
    if (packs_) {
      batch.documents.starts = at::empty_like(batch.input_ids);
      batch.fillers = at::zeros(batch.input_ids.sizes(), at::kBool);
    }
    RowPlaces places{batch.input_ids.mutable_data_ptr<std::int64_t>(),
                     batch.targets.mutable_data_ptr<std::int64_t>(),
                     packs_ ? batch.documents.starts.mutable_data_ptr<std::int64_t>() : nullptr,
                     packs_ ? batch.fillers->mutable_data_ptr<bool>() : nullptr};
    const std::int64_t first = (step - 1) * rows_in_step_;
    for (const SourceDraw::Row& row : drawn(first + rows.begin, first + rows.end)) {
      load_row(row, places);
      places.next(seq_len_);
      if (draw_) batch.sources.push_back(row.source);
    }
    return batch;
  }

  void check_labels(std::int64_t steps) override {
    if (steps == 0) return;
    const std::int64_t positions = steps * rows_in_step_;
    const auto counts = draw_ ? draw_->counts(positions) : std::vector<std::int64_t>{positions};
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      const SourceRows& source = sources_[i];
      const std::int64_t rows = std::min(counts[i], source.count);
      for (std::int64_t row = 0; row < rows; ++row) {
        for (const auto& piece : source.pieces(source.order.row_at(row), seq_len_ + 1)) {
          // Its first token is no target.
          const std::int64_t begin = piece.begin + 1;
          if (piece.count > 1 && source.tokens->has_target(begin, begin + piece.count - 1)) return;
        }
      }
    }
    const bool has_mask = std::ranges::any_of(
        sources_, [](const SourceRows& source) { return source.tokens->has_mask(); });
    throw Error(
        ErrorKind::kFormat,
        concat(sources_.front().tokens->name(),
               ": found no unmasked target in the rows of steps 1 to ", steps, ", expected ",
               has_mask ? "a mask with a byte that is not 0 among their targets"
                        : "a document of two tokens at least: its first one is no target"));
  }

  std::size_t sources() const override { return sources_.size(); }

  std::vector<double> shares(std::int64_t step) const override {
    std::vector<double> shares;
    if (!draw_) return shares;
    const std::int64_t rows = step * rows_in_step_;
    for (const std::int64_t count : draw_->counts(rows)) {
      shares.push_back(static_cast<double>(count) / static_cast<double>(rows));
    }
    return shares;
  }

  std::vector<std::string> as_text() const override {
    std::vector<std::string> lines;
    for (std::size_t i = 0; draw_ && i < sources_.size(); ++i) {
      lines.push_back(concat("source ", i + 1, ": ", 100.0 * draw_->share(i),
                             "% of the rows out of ", sources_[i].count, " in ",
                             sources_[i].tokens->name()));
    }
    for (const SourceRows& source : sources_) {
      if (!source.packing.empty()) lines.push_back(source.packing);
    }
    return lines;
  }

  std::vector<std::string> opened_from() const override {
    std::vector<std::string> lines;
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      const SourceRows& source = sources_[i];
      const auto add = [&](const std::string& line) {
        lines.push_back(draw_ ? concat("source ", i + 1, ": ", line) : line);
      };
      for (const std::string& file : source.tokens->files()) add(file);
      if (source.documents) {
        add(concat("packing = documents, ", source.documents->documents(),
                   " documents whose ends have the hash ", source.borders, ", in ", source.count,
                   " rows"));
      } else {
        add(concat("packing = stream, ", source.count, " rows"));
      }
    }
    return lines;
  }

 private:
  std::vector<SourceDraw::Row> drawn(std::int64_t begin, std::int64_t end) const {
    if (draw_) return draw_->rows(begin, end);
    std::vector<SourceDraw::Row> rows;
    for (; begin < end; ++begin) rows.push_back({0, begin});
    return rows;
  }

  void load_row(const SourceDraw::Row& row, const RowPlaces& places) const {
    const SourceRows& source = sources_[row.source];
    const TokenSource& tokens = *source.tokens;
    const auto length = static_cast<std::size_t>(seq_len_) + 1;
    const std::span ids(places.inputs, length);
    std::vector<std::uint8_t> is_target(length);
    std::size_t at = 0;
    for (const auto& piece : source.pieces(source.order.row_at(row.number), seq_len_ + 1)) {
      const auto count = static_cast<std::size_t>(piece.count);
      const auto part = ids.subspan(at, count);
      tokens.copy(piece.begin, part);
      check_ids(tokens, piece.begin, part, vocab_size_);
      const auto marks = std::span(is_target).subspan(at, count);
      std::ranges::fill(marks, 1);
      if (tokens.has_mask()) tokens.copy_mask(piece.begin, marks);
      marks.front() = 0;  // nothing in front of it is to predict it
      places.begin_document(at, at + count, length - 1);
      at += count;
      if (lengths_count_) places.begin_document(at - 1, at, length - 1);
    }
    // Empty places are a document of their own, which has no target. It begins as the row does: one
    // token again and again would draw all of them to the same few experts.
    for (std::size_t empty = at; empty < length; ++empty) ids[empty] = ids[empty - at];
    places.begin_document(at, length, length - 1);
    places.leave_empty(at, length - 1);
    for (std::size_t t = 0; t + 1 < length; ++t) {
      places.targets[t] = is_target[t + 1] == 0 ? nn::kIgnoredLabel : ids[t + 1];
    }
  }

  std::vector<SourceRows> sources_;
  std::optional<SourceDraw> draw_;  // none of one source
  std::int64_t seq_len_;
  std::int64_t rows_in_step_;
  std::int64_t vocab_size_;
  bool lengths_count_;  // Vocabulary's
  bool packs_;          // some rows hold several documents
};

/// Describes the rows of a source.
std::string packing_as_text(const TokenSource& tokens, const std::optional<DocumentRows>& packed,
                            const std::optional<std::string>& lacks, std::int64_t row) {
  if (packed) {
    const auto places = static_cast<double>(packed->rows()) * static_cast<double>(row);
    return concat("packing: ", packed->documents(), " documents in ", packed->rows(), " rows of ",
                  row, " tokens, ", packed->cut_documents(), " longer than a row and cut, ",
                  100.0 * static_cast<double>(packed->empty_places()) / places,
                  "% of the places empty, in ", tokens.name());
  }
  if (!lacks) return {};
  return concat("packing: rows are cut out of one stream in ", tokens.name(), ", since ",
                shown(*lacks), lacks->ends_with(".bin") ? " is not there" : " is text");
}

struct PackingOfSource {
  std::optional<Packing> packing;
  std::optional<std::string> lacks;  ///< why it is not as asked
};

/// As asked, where that is a must or can be had.
PackingOfSource packing_of(const NamedSource& source, const BatchRequest& request) {
  if (request.packing == Packing::kDocuments && !request.packing_is_a_must) {
    if (const auto lacks = lacks_borders(source.path)) return {Packing::kStream, lacks};
  }
  return {request.packing, {}};
}

SourceRows open_rows(const NamedSource& source, const BatchRequest& request, std::uint64_t seed,
                     std::int64_t rows_in_step) {
  const auto asked = packing_of(source, request);
  const bool packs = packs_documents(source.path, asked.packing);
  const std::int64_t row = *request.training.seq_len + 1;
  std::optional<DocumentRows> packed;
  std::uint64_t borders = 0;
  auto tokens = open_as(source.key, [&] {
    auto opened = open_source_tokens(source, request.vocabulary.reads_bytes, packs);
    if (packs) {
      packed.emplace(opened.document_ends, row);
      const auto bytes = std::as_bytes(std::span(opened.document_ends));
      borders = hash_bytes({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    }
    return std::move(opened.tokens);
  });
  const std::int64_t rows = packed ? packed->rows() : tokens->num_tokens() / row;
  TESSERA_CHECK(rows > 0, ErrorKind::kFormat, source.key, ": found ", tokens->num_tokens(),
                " tokens in ", tokens->name(), ", expected at least one row of ", row,
                " (training.seq_len + 1)");
  open_as(source.key, [&] { tokens->check_vocabulary(request.vocabulary.size); });
  auto lacks = asked.lacks;
  // Without a mask documents are not expected unless asked for.
  if (!request.packing && tokens->has_mask()) lacks = lacks_for_packing(source.path);
  auto words = packing_as_text(*tokens, packed, lacks, row);
  return {std::move(tokens),
          std::move(packed),
          RowOrder(seed, rows, rows_in_step),
          rows,
          std::move(words),
          borders};
}

}  // namespace

std::unique_ptr<BatchSource> open_token_batches(const BatchRequest& request) {
  const BatchSizes sizes = resolve_batch(request.training, request.data_ranks);
  require_seq_len(request.training);
  constexpr double kMostRows = 9e18;  // of a run: they are counted in 63 bits
  TESSERA_CHECK(static_cast<double>(request.steps) * static_cast<double>(sizes.global) <= kMostRows,
                ErrorKind::kConfig, "training.global_batch_size: found ", sizes.global,
                " rows a step for ", request.steps, " steps, expected at most ", kMostRows,
                " rows in all; lower either");
  std::vector<SourceRows> sources;
  std::optional<SourceDraw> draw;
  if (request.sources.empty()) {
    sources.push_back(open_rows({request.key, request.path}, request, request.seed, sizes.global));
  } else {
    std::vector<double> weights;
    for (const NamedSource& source : sources_of({{}, request.sources})) {
      require_no_batches(source);  // a pattern may have found some
      // A seed for each source, else sources of one length would come in one order.
      const auto seed = stream_of(request.seed, source.key);
      weights.push_back(request.sources[weights.size()].weight);
      sources.push_back(open_rows(source, request, seed, sizes.global));
    }
    if (sources.size() > 1) draw.emplace(request.seed, weights);
  }
  return std::make_unique<TokenBatches>(std::move(sources), std::move(draw),
                                        *request.training.seq_len, sizes.global,
                                        request.vocabulary);
}

}  // namespace tessera::train
