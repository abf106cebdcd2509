// Structs that list their fields once: what is written is read, with every fault refused at its
// place; hashes and differences see each field.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <array>
#include <optional>

#include "base/fields_hash.h"
#include "base/text/fields.h"
#include "base/text/json_fields.h"
#include "support/test.h"

namespace tessera::fields_property {
namespace {

using nlohmann::json;

enum class Colour : std::uint8_t { kRed, kGreen, kBlue };
constexpr auto words_of(Colour) {
  return std::to_array<Word<Colour>>(
      {{"red", Colour::kRed}, {"green", Colour::kGreen}, {"dark blue", Colour::kBlue}});
}

/// Files have it as a list of its values.
struct Dot {
  Colour colour = Colour::kRed;
  std::uint32_t at = 0;
  bool operator==(const Dot&) const = default;
};
template <class V>
constexpr void row(V& visit, Of<Dot>) {
  visit("colour", &Dot::colour);
  visit("at", &Dot::at, IntRange{0, 9});
}

struct Leaf {
  std::string name = {};
  double share = 0.0;
  std::vector<bool> flags = {};
  bool operator==(const Leaf&) const = default;
};
template <class V>
constexpr void fields(V& visit, Of<Leaf>) {
  visit("name", &Leaf::name, TextLimit{12, Letters::kPrintable});
  visit("share", &Leaf::share, NumberRange{0.0, 1.0});
  visit("flags", &Leaf::flags, List{3, "flags"});
}

/// Its fields stand among those of what it is in.
struct Head {
  std::int64_t step = 0;
  DType dtype = DType::kFloat32;
  bool operator==(const Head&) const = default;
};
template <class V>
constexpr void fields(V& visit, Of<Head>) {
  visit("step", &Head::step);
  visit("dtype", &Head::dtype);
}

struct Tree {
  Head head = {};
  bool is_tall = false;
  std::vector<Dot> dots = {};
  std::vector<std::vector<std::int64_t>> grid = {};
  std::array<Leaf, 3> by_colour = {};
  std::map<std::string, Leaf, std::less<>> by_name = {};
  std::optional<std::int64_t> budget = {};
  std::optional<Leaf> leaf = {};
  std::string note = {};
  double older = 0.5;
  int cached = 0;
  bool operator==(const Tree&) const = default;
};
template <class V>
constexpr void fields(V& visit, Of<Tree>) {
  visit("", &Tree::head);
  visit("is_tall", &Tree::is_tall);
  visit({"dots", "dots of it"}, &Tree::dots, List{4, "dots"});
  visit("grid", &Tree::grid, List{2, "rows", List{2, "cells", IntRange{-5, 5}}});
  visit("by_colour", &Tree::by_colour, ByWord<Colour>{});
  visit("by_name", &Tree::by_name);
  visit({"budget", Missing::kNull}, &Tree::budget, IntRange{0, 100});
  visit({"leaf", Missing::kLeftOut}, &Tree::leaf);
  visit({"note", Missing::kLeftOut}, &Tree::note);
  visit({"older", Missing::kOlder}, &Tree::older);
  visit({"cached", Missing::kNotInFile}, &Tree::cached, IntRange{0, 1});
}

struct Forgetful {
  std::int64_t said = 0;
  std::optional<std::int64_t> forgotten = {};
};
template <class V>
constexpr void fields(V& visit, Of<Forgetful>) {
  visit("said", &Forgetful::said);
}
static_assert(!lists_all<Forgetful>(), "a member that is no field is found when it is compiled");

/// Its base's fields stand among its own.
struct Derived : Head {
  bool is_small = false;
};
struct ForgetfulOfBase : Head {
  bool is_small = false;
};

}  // namespace
}  // namespace tessera::fields_property

namespace tessera {
template <>
struct BaseOf<fields_property::Derived> {
  using Type = fields_property::Head;
};
template <>
struct BaseOf<fields_property::ForgetfulOfBase> {
  using Type = fields_property::Head;
};
}  // namespace tessera

namespace tessera::fields_property {
namespace {

template <class V>
constexpr void fields(V& visit, Of<Derived>) {
  fields(visit, Of<Head>{});
  visit("is_small", &Derived::is_small);
}
template <class V>
constexpr void fields(V& visit, Of<ForgetfulOfBase>) {
  visit("step", &ForgetfulOfBase::step);
  visit("is_small", &ForgetfulOfBase::is_small);
}
static_assert(lists_all<Derived>());
static_assert(!lists_all<ForgetfulOfBase>(), "so is one of the base");

// ----------------------------------------------------------------------------------------- drawing

template <class T>
T one_of(std::initializer_list<T> values) {
  return *rc::gen::elementOf(std::vector<T>(values));
}

template <class Draw>
auto some(int most, const Draw& draw) {
  std::vector<decltype(draw())> items;
  const int count = *rc::gen::inRange(0, most + 1);
  for (int i = 0; i < count; ++i) items.push_back(draw());
  return items;
}

bool coin() { return *rc::gen::arbitrary<bool>(); }

Leaf draw_leaf() {
  Leaf leaf;
  leaf.name = one_of<std::string>({"", "a", "\"q\"", "b\\", "\u00e4\u20ac", "layers.0"});
  leaf.share = one_of({0.0, 1.0, 0.1, 1.0 / 3.0, 5e-324});
  leaf.flags = some(3, coin);
  return leaf;
}

Colour draw_colour() { return static_cast<Colour>(*rc::gen::inRange(0, 3)); }

/// Leaves `cached`, which files do not have.
Tree draw_tree() {
  Tree tree;
  tree.head.step = *rc::gen::arbitrary<std::int64_t>();
  tree.head.dtype = one_of({DType::kFloat32, DType::kBFloat16, DType::kInt64});
  tree.is_tall = coin();
  tree.dots = some(4, [] { return Dot{draw_colour(), *rc::gen::inRange<std::uint32_t>(0, 10)}; });
  tree.grid =
      some(2, [] { return some(2, [] { return *rc::gen::inRange<std::int64_t>(-5, 6); }); });
  for (auto& leaf : tree.by_colour) leaf = draw_leaf();
  for (const char* name : {"a", "is_tall", "/"}) {
    if (coin()) tree.by_name[name] = draw_leaf();
  }
  if (coin()) tree.budget = *rc::gen::inRange<std::int64_t>(0, 101);
  if (coin()) tree.leaf = draw_leaf();
  tree.note = one_of<std::string>({"", "x", "two words"});
  tree.older = one_of({0.5, -2.25, 1e300});
  return tree;
}

// ---------------------------------------------------------------------------------- there and back

struct Rules {};

std::string written(const Tree& tree) { return json_lines(JsonWriter(Rules())(tree)); }

Tree parsed(const std::string& text, OtherKeys others = OtherKeys::kRefused) {
  const auto value = parse_json_object(text, "FILE");
  Tree tree;
  Rules rules;
  JsonFieldsReader(rules, others).object(tree, {value, "FILE", JsonStyle::kData});
  return tree;
}

/// Empty for what is read.
std::string refusal(const json& value) {
  return refusal_of(ErrorKind::kFormat, [&] { parsed(value.dump()); });
}

RC_GTEST_PROP(Fields, WhatIsWrittenIsRead, ()) {
  const Tree tree = draw_tree();
  const auto text = written(tree);
  RC_ASSERT(parsed(text) == tree);
  RC_ASSERT(written(parsed(text)) == text);
}

RC_GTEST_PROP(Fields, KeysStandInTheOrderOfTheFields, ()) {
  Tree tree = draw_tree();
  tree.leaf = draw_leaf();
  tree.note = "x";
  std::vector<std::string> keys;
  const auto value = nlohmann::ordered_json::parse(written(tree));
  for (const auto& [key, item] : value.items()) keys.push_back(key);
  RC_ASSERT(keys ==
            std::vector<std::string>({"step", "dtype", "is_tall", "dots", "grid", "by_colour",
                                      "by_name", "budget", "leaf", "note", "older"}));
}

TEST(Fields, ATextHasALineForEachItemThatHoldsOthers) {
  Tree tree;
  tree.dots = {{Colour::kBlue, 3}, {Colour::kRed, 0}};
  const auto text = written(tree);
  EXPECT_THAT(text, StartsWith("{\n  \"step\": 0,\n  \"dtype\": \"float32\",\n"));
  EXPECT_THAT(text, Says("\n  \"dots\": [\n    [\"dark blue\",3],\n    [\"red\",0]\n  ],\n",
                         "\n  \"grid\": [],\n"));
  EXPECT_THAT(json_lines(JsonWriter(Rules())(tree), 1),
              Says("\n  \"dots\": [[\"dark blue\",3],[\"red\",0]],\n"));
}

// ----------------------------------------------------------------------------------------- refusals

/// visit(pointer, value) of all that is inside.
template <class Visit>
void walk(const json& value, const json::json_pointer& at, const Visit& visit) {
  visit(at, value);
  if (!value.is_structured()) return;
  if (value.is_array()) {
    for (std::size_t i = 0; i < value.size(); ++i) walk(value[i], at / i, visit);
  } else {
    for (const auto& [key, item] : value.items()) walk(item, at / key, visit);
  }
}

RC_GTEST_PROP(Fields, KeysThatNoFieldHasAreRefusedWhereverTheyStand, ()) {
  const auto whole = json::parse(written(draw_tree()));
  walk(whole, json::json_pointer(), [&](const json::json_pointer& at, const json& value) {
    const bool has_any_key = at == json::json_pointer("/by_name");
    if (!value.is_object() || has_any_key) return;
    auto edited = whole;
    edited[at]["spare"] = 1;
    const auto says = refusal(edited);
    RC_ASSERT(says.find("found 'spare', expected none but \"") != std::string::npos);
    RC_ASSERT(parsed(edited.dump(), OtherKeys::kPassedOver) == parsed(whole.dump()));
  });
}

RC_GTEST_PROP(Fields, KeysThatAreMissingAreRefusedUnlessTheirFieldMayLack, ()) {
  const auto whole = json::parse(written(draw_tree()));
  walk(whole, json::json_pointer(), [&](const json::json_pointer& at, const json&) {
    if (at.empty()) return;
    const auto above = at.parent_pointer();
    if (!whole[above].is_object() || above == json::json_pointer("/by_name")) return;
    auto edited = whole;
    edited[above].erase(at.back());
    const auto says = refusal(edited);
    const bool may_lack =
        above.empty() && (at.back() == "leaf" || at.back() == "note" || at.back() == "older");
    if (may_lack) {
      RC_ASSERT(says == "");
    } else {
      RC_ASSERT(says.find(concat("found no \"", at.back(), "\", expected one")) !=
                std::string::npos);
    }
  });
}

TEST(Fields, WhatIsLeftOutIsThatOfANewValue) {
  Tree tree;
  tree.older = 3.0;
  auto whole = json::parse(written(tree));
  EXPECT_FALSE(whole.contains("leaf") || whole.contains("note") || whole.contains("cached"));
  EXPECT_TRUE(whole["budget"].is_null());
  whole.erase("older");
  EXPECT_EQ(parsed(whole.dump()), Tree());
}

// One value becomes another: it is refused at its place, or it is of its field's range and read.
RC_GTEST_PROP(Fields, ValuesOutsideOfTheirRangeAreRefusedAtTheirPlace, ()) {
  const std::vector<json> others{json(-6),
                                 json(101),
                                 json(1e300),
                                 json("x"),
                                 json("\x1b"),
                                 json(std::string(13, 'x')),
                                 json(true),
                                 json(nullptr),
                                 json(std::uint64_t{1} << 63),
                                 json::array({1, 2, 3, 4, 5}),
                                 json::array(),
                                 json::object()};
  const auto whole = json::parse(written(draw_tree()));
  walk(whole, json::json_pointer(), [&](const json::json_pointer& at, const json&) {
    if (at.empty()) return;
    const json& other = others[*rc::gen::inRange<std::size_t>(0, others.size())];
    auto edited = whole;
    edited[at] = other;
    const auto says = refusal(edited);
    if (says.empty()) {
      RC_ASSERT(json::parse(written(parsed(edited.dump())))[at] == other);
    } else {
      const auto path = at.to_string();
      const auto first = path.substr(1, path.find('/', 1) - 1);
      RC_ASSERT(says.starts_with(concat("FILE: '", first, "': ")));
    }
  });
}

TEST(Fields, RefusalsSayWhatIsExpected) {
  Tree tree;
  tree.dots = {{}};
  tree.grid = {{1}};
  tree.budget = 1;
  const auto with = [&](const char* pointer, const json& value) {
    auto whole = json::parse(written(tree));
    whole[json::json_pointer(pointer)] = value;
    return refusal(whole);
  };
  EXPECT_THAT(with("/dots/0/1", 10),
              Says("FILE: 'dots': 'an item': 'an item': found '10'", "an integer from 0 to 9"));
  EXPECT_THAT(with("/dots/0/1", -1), Says("an integer from 0 to 9"));
  EXPECT_THAT(with("/dots/0/0", "blue"), Says("expected one of \"red\", \"green\", \"dark blue\""));
  EXPECT_THAT(with("/dots/0", {"red", 1, 2}), Says("expected [colour, at]"));
  EXPECT_THAT(with("/dots/0", json::object()), Says("expected [colour, at]"));
  EXPECT_THAT(with("/dots", std::vector<int>(5)), Says("a list of at most 4 dots"));
  EXPECT_THAT(with("/grid/0/0", 6), Says("an integer from -5 to 5"));
  EXPECT_THAT(with("/grid/0", {1, 1, 1}), Says("a list of at most 2 cells"));
  EXPECT_THAT(with("/budget", 101), Says("'budget': found '101', expected an integer from 0"));
  EXPECT_THAT(with("/step", 1.5), Says("an integer below 2^63"));
  EXPECT_THAT(with("/dtype", "float"), Says("expected the name of a dtype"));
  EXPECT_THAT(with("/is_tall", 1), Says("expected true or false"));
  EXPECT_THAT(with("/by_colour/red/name", "\x7f"), Says("at most 12 printable bytes"));
  EXPECT_THAT(with("/by_colour/red/name", "thirteen byte"), Says("at most 12 printable"));
  EXPECT_THAT(with("/by_colour/red/share", 1.5), Says("a number from 0 to 1"));
  EXPECT_THAT(with("/by_colour/pink", 1), Says("none but \"red\", \"green\", \"dark blue\""));
  EXPECT_THAT(with("/by_name", 1), Says("expected an object"));
  EXPECT_THAT(with("/leaf", nullptr), Says("'leaf': found 'null', expected an object"));
  EXPECT_THAT(with("/is_tall", nullptr), Says("expected true or false"));
}

// --------------------------------------------------------------------------- hashes and differences

struct Inner {
  std::string name = {};
  std::vector<bool> flags = {};
  bool operator==(const Inner&) const = default;
};
template <class V>
constexpr void fields(V& visit, Of<Inner>) {
  visit("name", &Inner::name);
  visit({"flags", "flag"}, &Inner::flags);
}

struct Outer {
  std::int64_t step_count = 0;
  bool is_tall = false;
  Colour colour = Colour::kRed;
  Inner inner = {};
  Inner hidden = {};
  std::vector<Dot> dots = {};
  std::vector<std::vector<std::uint32_t>> grid = {};
  std::array<Inner, 2> both = {};
  bool operator==(const Outer&) const = default;
};
template <class V>
constexpr void fields(V& visit, Of<Outer>) {
  visit("step_count", &Outer::step_count);
  visit("is_tall", &Outer::is_tall);
  visit("colour", &Outer::colour);
  visit("inner", &Outer::inner);
  visit({"hidden", "", Missing::kNotInFile}, &Outer::hidden);
  visit({"dots", "dot"}, &Outer::dots);
  visit("grid", &Outer::grid);
  visit("both", &Outer::both);
}

Inner draw_inner() { return {one_of<std::string>({"", "a", "b"}), some(2, coin)}; }
Outer draw_outer() {
  Outer outer;
  outer.step_count = *rc::gen::inRange<std::int64_t>(-1, 2);
  outer.is_tall = coin();
  outer.colour = draw_colour();
  outer.inner = draw_inner();
  outer.hidden = draw_inner();
  outer.dots = some(2, [] { return Dot{draw_colour(), *rc::gen::inRange<std::uint32_t>(0, 3)}; });
  outer.grid =
      some(2, [] { return some(2, [] { return *rc::gen::inRange<std::uint32_t>(0, 2); }); });
  outer.both = {draw_inner(), draw_inner()};
  return outer;
}

/// Prints the types that have no text themselves.
struct DifferenceRules {
  std::string text(const Dot& dot, AnyValue, Side) const {
    return concat(word_of(dot.colour), " at ", dot.at);
  }
  std::string text(const std::vector<std::uint32_t>& row, AnyValue, Side side) const {
    return concat(side == Side::kBefore ? "-" : "+", row.size());
  }
  template <class Out>
  void differ(Out& out, const std::string& where, const std::string& what,
              const std::array<Inner, 2>& before, const std::array<Inner, 2>& after,
              AnyValue) const {
    for (std::size_t i = 0; i < 2; ++i) {
      out.of(where, concat(what, " ", i), before.at(i), after.at(i));
    }
  }
};

std::vector<std::string> differences(const Outer& before, const Outer& after) {
  const DifferenceRules rules;
  Differences found(rules);
  found.of_fields("", before, after);
  return found.take();
}

// Two values of a few: often they are equal, or differ in one field.
RC_GTEST_PROP(Fields, HashesAndDifferencesSeeEachField, ()) {
  const Outer outer = draw_outer();
  const Outer other = draw_outer();
  RC_ASSERT((hash_of(other) == hash_of(outer)) == (other == outer));
  RC_ASSERT(differences(outer, other).empty() == (other == outer));
  each_field<Outer>([&](const Field&, auto member, const auto&) {
    Outer changed = outer;
    changed.*member = other.*member;
    RC_ASSERT((hash_of(changed) == hash_of(outer)) == (changed == outer));
    RC_ASSERT(differences(outer, changed).empty() == (changed == outer));
  });
}

// A hash of items alone would not see where one list ends and the next begins.
TEST(Fields, HashesTellListsApart) {
  Outer one, other;
  one.grid = {{1, 2}, {}};
  other.grid = {{1}, {2}};
  EXPECT_NE(hash_of(one), hash_of(other));
  other.grid = {{1, 2}};
  EXPECT_NE(hash_of(one), hash_of(other));
}

TEST(Fields, DifferencesNameFieldAndBothValues) {
  Outer before, after;
  before.dots = {{Colour::kRed, 1}, {Colour::kRed, 2}};
  after.dots = {{Colour::kRed, 1}, {Colour::kBlue, 2}, {}};
  before.grid = {{7, 8}};
  after.is_tall = true;
  after.step_count = 9;
  after.inner = {"x", {true}};
  after.hidden.name = "y";
  after.both[1].name = "z";
  EXPECT_THAT(differences(before, after),
              ElementsAre("step count: 0, 9", "is tall: no, yes", "inner, name: , x",
                          "inner, flag 1 of 0, 1: nothing more, yes", "name: , y",
                          "dot 2 of 2, 3: red at 2, dark blue at 2",
                          "grid 1 of 1, 0: -2, nothing more", "both 1, name: , z"));
}

}  // namespace
}  // namespace tessera::fields_property
