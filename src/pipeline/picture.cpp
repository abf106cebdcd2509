#include "pipeline/picture.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "tessera/error.h"

namespace tessera::pipeline {
namespace {

constexpr double kMargin = 12.0;
constexpr double kLabel = 64.0;  // "rank 12" in front of a row
constexpr double kRow = 30.0;
constexpr double kBox = 26.0;
constexpr double kNarrowest = 16.0;  // of a box, for two digits
constexpr double kWidest = 16000.0;  // of all of a row; browsers draw no more
constexpr double kLegend = 26.0;

struct Colour {
  std::string_view op;
  std::string_view name;
  std::array<std::string_view, 2> fill;  ///< of the first stage of a rank, of later ones
};

const Colour& colour_of(ActionKind kind) {
  static constexpr std::array<Colour, kActionKinds> kColours{{
      {"F", "forward", {"#a9c8f5", "#5f93dd"}},
      {"I", "gradient of the input", {"#a6dfd8", "#4fb3a8"}},
      {"W", "gradients of the weights", {"#c5e3a6", "#86b957"}},
      {"B", "backward, both at once", {"#f6c79a", "#df8f45"}},
  }};
  return kColours.at(static_cast<std::size_t>(kind));
}

/// Two digits after the point, none where they are zeros.
std::string number(double value) {
  const double rounded = std::round(value * 100.0) / 100.0;
  return concat(rounded);
}

class Picture {
 public:
  Picture(const Schedule& schedule, const Simulated& simulated)
      : schedule_(schedule), simulated_(simulated), scale_(scale_of(simulated)) {}

  std::string draw() {
    const double width = 2 * kMargin + kLabel + std::max(simulated_.makespan * scale_, 560.0);
    const double height =
        2 * kMargin + kRow * static_cast<double>(schedule_.slots.size()) + kLegend;
    text_ =
        concat("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", number(width), "\" height=\"",
               number(height), "\" viewBox=\"0 0 ", number(width), ' ', number(height),
               "\" font-family=\"sans-serif\" font-size=\"11\">\n"
               "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n");
    for (int rank = 0; rank < schedule_.ranks(); ++rank) row(rank);
    legend(kMargin + kRow * static_cast<double>(schedule_.slots.size()) + kLegend / 2);
    return text_ + "</svg>\n";
  }

 private:
  /// The shortest slot is as wide as its number, where that is no picture of a mile.
  static double scale_of(const Simulated& simulated) {
    double shortest = simulated.makespan;
    for (const SimulatedRank& rank : simulated.ranks) {
      for (const TimeSpan& slot : rank.slots) {
        const double cost = slot.end - slot.begin;
        if (cost > 0.0) shortest = std::min(shortest, cost);
      }
    }
    if (shortest <= 0.0) return 1.0;
    return std::min(kNarrowest / shortest, kWidest / simulated.makespan);
  }

  void row(int rank) {
    const auto at = static_cast<std::size_t>(rank);
    const double top = kMargin + kRow * rank;
    text_ += concat("<text x=\"", number(kMargin), "\" y=\"", number(top + 17), "\">rank ", rank,
                    "</text>\n");
    const std::vector<int> stages = schedule_.stages_of(rank);
    for (std::size_t i = 0; i < schedule_.slots[at].size(); ++i) {
      const Slot& slot = schedule_.slots[at][i];
      const TimeSpan& time = simulated_.ranks[at].slots[i];
      text_ += concat("<g><title>", to_string(slot), ", ", number(time.begin), " to ",
                      number(time.end), "</title>");
      const double height = slot.paired ? kBox / 2 : kBox;
      double y = top;
      slot.each([&](const Action& action) {
        box(action, action.stage == stages.front() ? 0 : 1, time, y, height);
        y += height;
      });
      text_ += "</g>\n";
    }
  }

  void box(const Action& action, std::size_t shade, const TimeSpan& time, double y, double height) {
    const double x = kMargin + kLabel + time.begin * scale_;
    const double width = (time.end - time.begin) * scale_;
    text_ += concat("<rect x=\"", number(x), "\" y=\"", number(y), "\" width=\"", number(width),
                    "\" height=\"", number(height), "\" fill=\"",
                    colour_of(action.kind).fill.at(shade), "\" stroke=\"#ffffff\"/><text x=\"",
                    number(x + width / 2), "\" y=\"", number(y + height / 2 + 4),
                    "\" text-anchor=\"middle\">", action.micro_batch, "</text>");
  }

  void legend(double y) {
    double x = kMargin + kLabel;
    for (std::size_t kind = 0; kind < kActionKinds; ++kind) {
      const Colour& colour = colour_of(static_cast<ActionKind>(kind));
      text_ += concat("<rect x=\"", number(x), "\" y=\"", number(y),
                      "\" width=\"12\" height=\"12\" "
                      "fill=\"",
                      colour.fill[0], "\"/><text x=\"", number(x + 16), "\" y=\"", number(y + 10),
                      "\">", colour.op, " ", colour.name, "</text>\n");
      x += 40.0 + 6.0 * static_cast<double>(colour.name.size());
    }
  }

  const Schedule& schedule_;
  const Simulated& simulated_;
  double scale_;
  std::string text_;
};

}  // namespace

std::string to_svg(const Schedule& schedule, const Simulated& simulated) {
  return Picture(schedule, simulated).draw();
}

}  // namespace tessera::pipeline
