// Options of a registered hook: named, typed, and checked before the hook is constructed.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace commhook {

// The C++ types of Python's bool, int, float, str and torch.dtype.
using OptionValue = std::variant<bool, int64_t, double, std::string, at::ScalarType>;

struct OptionSpec {
  struct Rule {
    std::string contract;  // for example "at least 0"
    std::function<bool(const OptionValue&)> holds;
  };
  std::string name;
  size_t type;  // index into the types of OptionValue
  std::optional<OptionValue> default_value;
  std::vector<Rule> rules;
};

// An option with a value of type T: bool, int64_t, double, std::string or at::ScalarType. An option
// without a default is required.
//
//   commhook::Option<double>("threshold", 1e-3).atLeast(0)
template <typename T>
class Option {
 public:
  static_assert(std::is_same_v<T, bool> || std::is_same_v<T, int64_t> ||
                    std::is_same_v<T, double> || std::is_same_v<T, std::string> ||
                    std::is_same_v<T, at::ScalarType>,
                "an option is a bool, int64_t, double, std::string or at::ScalarType");

  explicit Option(std::string name) { spec_.name = std::move(name); }
  Option(std::string name, T default_value) : Option(std::move(name)) {
    spec_.default_value = OptionValue(std::in_place_type<T>, std::move(default_value));
  }

  Option atLeast(T least) const {
    return where("at least " + c10::str(least), [least](const T& value) { return value >= least; });
  }
  Option atMost(T most) const {
    return where("at most " + c10::str(most), [most](const T& value) { return value <= most; });
  }
  Option above(T bound) const {
    return where("above " + c10::str(bound), [bound](const T& value) { return value > bound; });
  }
  Option below(T bound) const {
    return where("below " + c10::str(bound), [bound](const T& value) { return value < bound; });
  }
  Option oneOf(std::vector<T> values) const {
    std::string contract = "one of ";
    for (size_t i = 0; i < values.size(); ++i) {
      contract += (i == 0 ? "" : ", ") + text(values[i]);
    }
    return where(contract, [values = std::move(values)](const T& value) {
      for (const auto& allowed : values) {
        if (allowed == value) {
          return true;
        }
      }
      return false;
    });
  }
  // Any other rule; `contract` completes the sentence "must be ...".
  Option where(std::string contract, std::function<bool(const T&)> holds) const {
    Option option = *this;
    option.spec_.rules.push_back(
        {std::move(contract), [holds = std::move(holds)](const OptionValue& value) {
           return holds(std::get<T>(value));
         }});
    return option;
  }

  OptionSpec spec() const {
    OptionSpec spec = spec_;
    spec.type = OptionValue(std::in_place_type<T>).index();
    return spec;
  }

 private:
  static std::string text(const T& value) {
    if constexpr (std::is_same_v<T, std::string>) {
      return "'" + value + "'";
    } else if constexpr (std::is_same_v<T, at::ScalarType>) {
      return "torch." + std::string(c10::getDtypeNames(value).first);
    } else {
      return c10::str(value);
    }
  }

  OptionSpec spec_{};
};

}  // namespace commhook
