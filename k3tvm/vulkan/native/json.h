// Writes JSON text: objects and arrays of strings, numbers and booleans.
#ifndef K3TVM_VULKAN_JSON_H_
#define K3TVM_VULKAN_JSON_H_

#include <cstdio>
#include <string>
#include <type_traits>

namespace k3tvm::vulkan {

class Json {
 public:
  Json& Open(char bracket) { return Separate().Raw(std::string(1, bracket), true); }
  Json& Close(char bracket) { return Raw(std::string(1, bracket), false); }

  // Begins a member of an object; a value, or Open, follows.
  Json& Key(const std::string& name) {
    Value(name);
    text_ += ": ";
    fresh_ = true;
    return *this;
  }

  Json& Value(const std::string& value) { return Separate().Raw(Quoted(value), false); }
  Json& Value(const char* value) { return Value(std::string(value)); }
  Json& Value(bool value) { return Separate().Raw(value ? "true" : "false", false); }
  template <typename T, typename = std::enable_if_t<std::is_integral_v<T>>>
  Json& Value(T value) {
    return Separate().Raw(std::to_string(value), false);
  }

  template <typename T>
  Json& Member(const std::string& name, const T& value) {
    return Key(name).Value(value);
  }

  template <typename Range>
  Json& List(const std::string& name, const Range& values) {
    Key(name).Open('[');
    for (const auto& value : values) Value(value);
    return Close(']');
  }

  const std::string& text() const { return text_; }

 private:
  Json& Separate() {
    if (!fresh_) text_ += ", ";
    return *this;
  }

  Json& Raw(const std::string& text, bool fresh) {
    text_ += text;
    fresh_ = fresh;
    return *this;
  }

  static std::string Quoted(const std::string& value) {
    std::string out = "\"";
    for (char c : value) {
      if (c == '"' || c == '\\') {
        out += '\\';
        out += c;
      } else if (static_cast<unsigned char>(c) < 0x20) {
        char code[8];
        std::snprintf(code, sizeof(code), "\\u%04x", c);
        out += code;
      } else {
        out += c;
      }
    }
    return out + "\"";
  }

  std::string text_;
  bool fresh_ = true;  // nothing stands before the next value, so it needs no comma
};

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_JSON_H_
