# cmake -D out=FILE.cc -D files=A;B -P embed.cmake: a source with the files' bytes, for assets.h.
set(arrays)
set(table)
set(number 0)
foreach(file IN LISTS files)
  file(READ "${file}" bytes HEX)
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
  get_filename_component(name "${file}" NAME)
  string(APPEND arrays "constexpr unsigned char k${number}[] = {\n${bytes}};\n")
  string(APPEND table "    {\"${name}\", View(k${number})},\n")
  math(EXPR number "${number} + 1")
endforeach()
file(
  WRITE "${out}"
  "#include \"server/page/assets.h\"

namespace thalweg {
namespace {

${arrays}
template <size_t n>
std::string_view View(const unsigned char (&bytes)[n]) {
  return {reinterpret_cast<const char*>(bytes), n};
}

}  // namespace

const Asset* FindAsset(std::string_view name) {
  static const Asset assets[] = {
${table}  };
  for (const Asset& asset : assets) {
    if (asset.name == name) return &asset;
  }
  return nullptr;
}

}  // namespace thalweg
")
