#include "cli/report_json.h"

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const check::Finding& finding) {
  return {{"kind", to_string(finding.kind)},
          {"operation", finding.operation},
          {"unit", finding.unit},
          {"parameter", finding.parameter},
          {"axis", finding.axis},
          {"found", finding.found},
          {"expected", finding.expected},
          {"mend", finding.mend},
          {"text", check::to_string(finding)}};
}

Json json_of(const check::Place& place) {
  Json held = Json::object();
  for (const auto& one : place.held) held[one.what] = one.bytes;
  Json sent = Json::array();
  for (const auto& one : place.sent) {
    sent.push_back({{"axis", one.axis}, {"what", one.what}, {"bytes", one.bytes}});
  }
  Json passes = Json::array();
  for (const auto& one : place.passes) {
    passes.push_back({{"unit", one.unit},
                      {"pass", one.is_forward ? "forward" : "backward"},
                      {"before", one.before},
                      {"most", one.most},
                      {"after", one.after}});
  }
  return {{"pp", place.pp},           {"rank", place.rank}, {"held_bytes", held},
          {"peak_bytes", place.peak}, {"sent_bytes", sent}, {"passes", passes}};
}

Json json_of(const check::StepTime& time) {
  return {{"by", time.by},
          {"step_ms", time.step_ms},
          {"compute_ms", time.compute_ms},
          {"again_ms", time.again_ms},
          {"waited_ms", time.waited_ms},
          {"rest_ms", time.rest_ms},
          {"bubble", time.bubble ? Json(*time.bubble) : Json()}};
}

Json json_of(const check::ParameterVerdict& one) {
  return {{"parameter", one.parameter},
          {"verdict", to_string(one.verdict)},
          {"error", one.error},
          {"ulps", one.ulps},
          {"found", one.found}};
}

template <class T>
Json array_of(const std::vector<T>& all) {
  Json array = Json::array();
  for (const T& one : all) array.push_back(json_of(one));
  return array;
}

Json json_of(const check::Report& report) {
  return {{"model", report.model},
          {"layout", report.layout},
          {"world_size", report.world},
          {"findings", array_of(report.findings)},
          {"notes", report.notes},
          {"compared", report.compared},
          {"knows_tokens", report.knows_tokens},
          {"memory_bytes", report.memory ? Json(*report.memory) : Json()},
          {"places", array_of(report.places)},
          {"step_time", report.time ? json_of(*report.time) : Json()}};
}

Json json_of(const check::GradientDiff& diff) {
  return {{"a", diff.a},
          {"b", diff.b},
          {"is_right", diff.is_right()},
          {"dtype", to_string(diff.dtype)},
          {"loss_a", diff.loss_a},
          {"loss_b", diff.loss_b},
          {"findings", array_of(diff.findings)},
          {"parameters", array_of(diff.parameters)}};
}

std::string text_of(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + '\n';
}

}  // namespace

std::string json_text(const check::Report& report) { return text_of(json_of(report)); }

std::string json_text(const check::GradientDiff& diff) { return text_of(json_of(diff)); }

}  // namespace tessera::cli
