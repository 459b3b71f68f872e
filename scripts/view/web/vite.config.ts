import { defineConfig } from "vite";

const NOTICE = "/* with uPlot, (c) Leon Sorokin, MIT licence: https://github.com/leeoniya/uPlot */";

// One script and one style sheet, whose names stay: the server and the export name them.
export default defineConfig({
  base: "./",
  build: {
    outDir: "../built",
    emptyOutDir: true,
    modulePreload: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      output: {
        entryFileNames: "app.js",
        assetFileNames: "app[extname]",
        codeSplitting: false,
        postBanner: NOTICE,
      },
    },
  },
});
