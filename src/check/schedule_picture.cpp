#include "check/schedule_picture.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "check/markup.h"
#include "tessera/error.h"

namespace tessera::check {
namespace {

// With more boxes a page would be large; numbers are read in few of them only.
constexpr std::size_t kMostNumbered = 600;
constexpr std::size_t kMostBoxes = 5000;

struct Box {
  double x = 0, y = 0, width = 0, height = 0;
  std::string fill = {};   ///< "#a9c8f5"
  std::string title = {};  ///< the same text on the boxes of a slot
};
struct Label {
  double x = 0, y = 0;
  std::string text = {};
};
struct Drawn {
  double width = 0;
  std::vector<Box> boxes = {};
  std::vector<Label> numbers = {};                               ///< of the boxes
  std::vector<Label> rows = {};                                  ///< "rank 0"
  std::vector<std::pair<std::string, std::string>> legend = {};  ///< a fill and its name
};

struct Tag {
  std::string_view name = {};  ///< "rect", "/g"
  std::map<std::string_view, std::string_view> attributes = {};
};

bool is_colour(std::string_view text) {
  return text.size() == 7 && text[0] == '#' &&
         text.find_first_not_of("0123456789abcdef", 1) == std::string_view::npos;
}

/// Reads elements one after the other, as they follow in what to_svg() writes.
class SvgReader {
 public:
  explicit SvgReader(std::string_view svg) : rest_(svg) {}

  std::optional<Drawn> read() {
    while (true) {
      const std::string_view text = until('<');
      if (rest_.empty()) break;
      const std::string_view inside = until('>');
      const auto tag = tag_of(inside);
      if (!tag || !take(*tag, text)) return std::nullopt;
    }
    if (depth_ != 0 || drawn_.boxes.empty()) return std::nullopt;
    return std::move(drawn_);
  }

 private:
  /// Returns the text before `end` and skips both.
  std::string_view until(char end) {
    const std::size_t at = std::min(rest_.find(end), rest_.size());
    const std::string_view text = rest_.substr(0, at);
    rest_.remove_prefix(std::min(at + 1, rest_.size()));
    return text;
  }

  static std::optional<Tag> tag_of(std::string_view inside) {
    if (inside.ends_with('/')) inside.remove_suffix(1);
    Tag tag{.name = inside.substr(0, inside.find(' '))};
    inside.remove_prefix(tag.name.size());
    while (!inside.empty()) {
      const std::size_t equals = inside.find("=\"");
      if (inside[0] != ' ' || equals == std::string_view::npos) return std::nullopt;
      const std::size_t end = inside.find('"', equals + 2);
      if (end == std::string_view::npos) return std::nullopt;
      tag.attributes[inside.substr(1, equals - 1)] = inside.substr(equals + 2, end - equals - 2);
      inside.remove_prefix(end + 1);
    }
    return tag;
  }

  static std::optional<double> number(const Tag& tag, std::string_view name) {
    const auto found = tag.attributes.find(name);
    if (found == tag.attributes.end()) return std::nullopt;
    const std::string_view text = found->second;
    double value = 0;
    const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (failed != std::errc{} || end != text.data() + text.size()) return std::nullopt;
    if (!std::isfinite(value) || value < 0.0 || value > 1e6) return std::nullopt;
    return value;
  }

  /// `text`: what stands between the tag before and this one. False: to_svg() writes no such thing.
  bool take(const Tag& tag, std::string_view text) {
    if (tag.name == "svg") return take_size(tag);
    if (tag.name == "rect") return take_box(tag);
    if (tag.name == "g") return ++depth_ == 1;
    if (tag.name == "text") {
      const auto x = number(tag, "x"), y = number(tag, "y");
      if (!x || !y) return false;
      label_ = {*x, *y, {}};
      return true;
    }
    if (tag.name == "/text") {
      label_.text = text;
      put_label();
      return true;
    }
    if (tag.name == "/title") title_ = text;
    if (tag.name == "/g") return --depth_ == 0;
    return tag.name == "title" || tag.name == "/title" || tag.name == "/svg";
  }

  bool take_size(const Tag& tag) {
    const auto width = number(tag, "width");
    drawn_.width = width.value_or(0.0);
    return width.has_value();
  }

  bool take_box(const Tag& tag) {
    const auto fill = tag.attributes.find("fill");
    if (fill == tag.attributes.end() || !is_colour(fill->second)) return false;
    if (!tag.attributes.contains("x")) return true;  // the paper
    const auto x = number(tag, "x"), y = number(tag, "y");
    const auto width = number(tag, "width"), height = number(tag, "height");
    if (!x || !y || !width || !height) return false;
    if (depth_ == 0) {
      drawn_.legend.emplace_back(fill->second, "");
    } else {
      drawn_.boxes.push_back({*x, *y, *width, *height, std::string(fill->second), title_});
    }
    return true;
  }

  void put_label() {
    if (depth_ > 0) {
      drawn_.numbers.push_back(label_);
    } else if (!drawn_.legend.empty()) {
      drawn_.legend.back().second = label_.text;
    } else {
      drawn_.rows.push_back(label_);
    }
  }

  std::string_view rest_;
  Drawn drawn_;
  Label label_;
  std::string title_;
  int depth_ = 0;  ///< of groups: a slot each
};

double bottom_of(const Drawn& drawn) {
  double bottom = 0;
  for (const Box& box : drawn.boxes) bottom = std::max(bottom, box.y + box.height);
  return bottom;
}

std::string heading(const Drawn& drawn) {
  return concat("The slots of ", drawn.rows.size(), " ranks of the pipeline in one step, ",
                drawn.boxes.size(), " boxes, time to the right");
}

std::string label_text(const Label& label) {
  return concat("<text x=\"", coordinate(label.x), "\" y=\"", coordinate(label.y), "\">",
                escaped(label.text, 20), "</text>");
}

/// Scrolls where it is wider than the page: a box is as wide as its number.
std::string numbered(const Drawn& drawn) {
  const std::string width = coordinate(drawn.width), height = coordinate(bottom_of(drawn) + 12);
  std::string text = concat("<div class=\"wide\" tabindex=\"0\"><svg class=\"slots\" width=\"",
                            width, "\" height=\"", height, "\" viewBox=\"0 0 ", width, " ", height,
                            "\" role=\"img\" aria-labelledby=\"slots\"><title id=\"slots\">",
                            heading(drawn), "</title>\n");
  for (const Label& row : drawn.rows) text += label_text(row) + "\n";
  for (const Box& box : drawn.boxes) {
    text += concat("<rect x=\"", coordinate(box.x), "\" y=\"", coordinate(box.y), "\" width=\"",
                   coordinate(box.width), "\" height=\"", coordinate(box.height), "\" fill=\"",
                   box.fill, "\"><title>", escaped(box.title, 60), "</title></rect>\n");
  }
  text += "<g class=\"numbers\">";
  for (const Label& number : drawn.numbers) text += label_text(number) + "\n";
  return text + "</g></svg></div>\n";
}

/// One path a colour, squeezed into the width of the page.
std::string squeezed(const Drawn& drawn) {
  constexpr double kAcross = 2000.0;
  double left = drawn.width, right = 0.0;
  for (const Box& box : drawn.boxes) {
    left = std::min(left, box.x);
    right = std::max(right, box.x + box.width);
  }
  const double scale = kAcross / std::max(right - left, 1.0);
  std::map<std::string, std::string> paths;
  for (const Box& box : drawn.boxes) {
    const auto begin = std::lround((box.x - left) * scale);
    const auto width = std::lround((box.x + box.width - left) * scale) - begin;
    paths[box.fill] += concat("M", begin, " ", std::lround(box.y), "h", width, "v",
                              std::lround(box.height), "h-", width, "z");
  }
  const std::string height = coordinate(std::ceil(bottom_of(drawn)));
  std::string text = concat(
      "<svg class=\"chart slots\" width=\"100%\" height=\"", height, "\" viewBox=\"0 0 ", kAcross,
      " ", height, "\" preserveAspectRatio=\"none\" role=\"img\" aria-labelledby=\"slots\">",
      "<title id=\"slots\">", heading(drawn), "</title>\n");
  for (const auto& [fill, path] : paths) {
    text += concat("<path fill=\"", fill, "\" d=\"", path, "\"/>\n");
  }
  return text + "</svg>\n";
}

std::string legend_of(const Drawn& drawn) {
  std::string text = "<ul class=\"legend\">";
  for (const auto& [fill, name] : drawn.legend) {
    text += concat(
        "<li><svg width=\"12\" height=\"12\" aria-hidden=\"true\"><rect width=\"12\" "
        "height=\"12\" fill=\"",
        fill, "\"/></svg>", escaped(name), "</li>\n");
  }
  return text + "</ul>\n";
}

}  // namespace

std::string schedule_picture(std::string_view svg) {
  const auto drawn = SvgReader(svg).read();
  if (!drawn) return "<p>The picture of the schedule cannot be read.</p>\n";
  if (drawn->boxes.size() > kMostBoxes) {
    return concat(
        "<p>The schedule has ", grouped(std::ssize(drawn->boxes)),
        " boxes, more than this page holds: <code>tessera schedule KIND --svg FILE</code> "
        "draws it alone.</p>\n");
  }
  const bool has_numbers = drawn->boxes.size() <= kMostNumbered;
  return concat(
      "<figure>", has_numbers ? numbered(*drawn) : squeezed(*drawn), legend_of(*drawn),
      "<figcaption>A row a rank of the pipeline, the first stage on top; later stages of a "
      "rank in a darker colour",
      has_numbers ? "; numbers are micro-batches, times are in milliseconds." : ".",
      "</figcaption></figure>\n");
}

}  // namespace tessera::check
