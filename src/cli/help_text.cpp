#include "cli/help_text.h"

#include <CLI/Formatter.hpp>
#include <algorithm>
#include <set>

#include "base/text/printable.h"
#include "base/text/wrapped.h"
#include "tessera/error.h"
#include "train/config/config_keys.h"
#include "train/config/config_names.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kColumns = 80;
constexpr std::size_t kTexts = 26;  ///< the column where descriptions begin
constexpr std::string_view kHelpKeys = "--help-keys";

/// Prints "  --name VALUE" followed by `text`, which begins below a long name.
std::string row(const std::string& name, std::string_view text) {
  std::string lines = wrapped(text, kTexts, kColumns);
  const std::string left = "  " + name;
  if (left.size() + 2 > kTexts) return left + '\n' + lines;
  return lines.replace(0, left.size(), left);
}

/// Maps the type name of CLI11 to ours: "INT:from 1 to 4096" is N.
std::string value_of(const ::CLI::Option& option) {
  const std::string type = option.get_type_name();
  if (option.get_items_expected_max() == 0 || type.empty()) return "";
  if (type.starts_with("INT") || type.starts_with("UINT")) return " N";
  return type.starts_with("FLOAT") ? " X" : " VALUE";
}

std::string names_of(const std::set<::CLI::Option*>& options) {
  std::string names;
  for (const ::CLI::Option* option : options) {
    names += concat(names.empty() ? "" : ", ", option->get_name());
  }
  return names;
}

std::string option_row(const ::CLI::Option& option) {
  std::string text = option.get_description();
  const auto add = [&text](std::string_view condition) { text += concat(" (", condition, ")"); };
  if (option.get_required() && !option.get_positional()) add("required");
  if (!option.get_needs().empty()) add("with " + names_of(option.get_needs()));
  if (!option.get_excludes().empty()) add("not with " + names_of(option.get_excludes()));
  return row(option.get_name() + (option.get_positional() ? "" : value_of(option)), text);
}

class Screen final : public ::CLI::Formatter {
 public:
  std::string make_help(const ::CLI::App* app, std::string, ::CLI::AppFormatMode) const override {
    std::string text = wrapped(app->get_description(), 0, kColumns);
    return text + (app->get_parent() == nullptr ? program(*app) : verb(*app)) +
           (app->get_footer().empty() ? "" : "\n" + wrapped_lines(app->get_footer()));
  }

 private:
  static std::string wrapped_lines(std::string_view text) {
    std::string lines;
    while (!text.empty()) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      lines += wrapped(text.substr(0, end), 0, kColumns);
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    return lines;
  }

  static std::string program(const ::CLI::App& app) {
    std::string text = "\nUsage: tessera VERB [options]; tessera VERB --help has the options.\n\n";
    for (const ::CLI::App* verb : app.get_subcommands({})) {
      text += row(verb->get_name(), verb->get_description());
    }
    text += row("--version", app.get_version_ptr()->get_description());
    return text + help_keys_row();
  }

  static std::string verb(const ::CLI::App& app) {
    std::string usage = concat("Usage: tessera ", app.get_name());
    std::string rows;
    for (const ::CLI::Option* option : app.get_options()) {
      if (option == app.get_help_ptr()) continue;
      rows += option_row(*option);
      if (!option->get_positional()) continue;
      usage += concat(option->get_required() ? " " : " [", option->get_name(),
                      option->get_required() ? "" : "]");
    }
    if (app.get_name() != "schedule") rows += help_keys_row();
    return concat("\n", usage, " [options]\n\n", rows);
  }

  static std::string help_keys_row() {
    return row(
        concat(kHelpKeys, " [SECTION]"),
        "List the configuration keys with type, unit and default: all, or those of one section.");
  }
};

}  // namespace

std::shared_ptr<::CLI::FormatterBase> screen_formatter() { return std::make_shared<Screen>(); }

std::string where_keys_are() {
  std::string text =
      "Every key of the configuration may be given as --section.key VALUE. Sections:";
  for (const std::string& section : train::config_sections()) text += " " + section;
  return text + ".";
}

bool takes_key(std::string_view verb, std::string_view full_name) {
  const bool of_config_json = full_name == "model.allow_unknown_config_keys";
  if (verb == "generate") {
    return of_config_json || full_name == "device" || full_name.starts_with("precision.");
  }
  if (verb == "measure") return full_name == "device" || full_name.starts_with("comm.");
  return verb == "convert" ? of_config_json : verb != "schedule";
}

std::string keys_asked_for(const std::vector<std::string>& words) {
  const auto asked = std::ranges::find_if(words, [](const std::string& word) {
    return word == kHelpKeys || word.starts_with(concat(kHelpKeys, "="));
  });
  if (asked == words.end()) return "";
  std::string of;
  if (asked->size() > kHelpKeys.size()) {
    of = asked->substr(kHelpKeys.size() + 1);
  } else if (asked + 1 != words.end() && !(asked + 1)->starts_with("-")) {
    of = *(asked + 1);
  }
  const std::string verb = asked == words.begin() ? "" : words.front();
  TESSERA_CHECK(verb != "schedule", ErrorKind::kUsage, "schedule: found ", kHelpKeys,
                ", expected no key of a configuration");
  const train::ConfigKey* const key = train::find_key(of);
  TESSERA_CHECK(of.empty() || train::is_section(of) || key != nullptr, ErrorKind::kUsage, kHelpKeys,
                ": unknown section ", printable(of), train::advice_on_section(of));
  const auto is_shown = [&](const train::ConfigKey& each) {
    return takes_key(verb, each.full_name()) &&
           (of.empty() || each.section == of || each.full_name() == of);
  };
  TESSERA_CHECK(std::ranges::any_of(train::config_keys(), is_shown), ErrorKind::kUsage, verb,
                ": found ", kHelpKeys, " ", printable(of), ", expected a section of which ", verb,
                " takes keys; see tessera ", verb, " ", kHelpKeys);
  return train::config_help(is_shown);
}

}  // namespace tessera::cli
